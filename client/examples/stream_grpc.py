"""Stream a completion from Triton with plain ``tritonclient``, without importing Tidegate.

    pip install "tritonclient[grpc]"
    python stream_grpc.py "Once upon a time" --url 127.0.0.1:8001 --max-tokens 64 --deadline-ms 5000
    python stream_grpc.py "Once upon a time" --max-tokens 1000 --cancel-after 8

The inputs and outputs are those of Triton's vLLM backend. The deadline is enforced twice: the
``deadline_ms`` parameter lets the server give up by itself, and the gRPC timeout of the stream
stops this script even if the network is down. The iterator's ``cancel()`` cancels the gRPC call,
and the server stops generating. Leaving the loop without ``cancel()`` does not stop the server.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException


def build_inputs(prompt: str, sampling: dict[str, Any]) -> list[triton.InferInput]:
    """Inputs of the model: every tensor has shape [1]; sampling parameters are JSON."""
    text = triton.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([prompt.encode()], dtype=np.object_))
    stream = triton.InferInput("stream", [1], "BOOL")
    stream.set_data_from_numpy(np.array([True]))
    parameters = triton.InferInput("sampling_parameters", [1], "BYTES")
    parameters.set_data_from_numpy(np.array([json.dumps(sampling).encode()], dtype=np.object_))
    return [text, stream, parameters]


async def stream_text(args: argparse.Namespace) -> AsyncIterator[str]:
    """Pieces of the completion as they arrive."""
    sampling = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    if args.seed is not None:
        sampling["seed"] = args.seed

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {
            "model_name": args.model,
            "inputs": build_inputs(args.prompt, sampling),
            "outputs": [triton.InferRequestedOutput("text_output")],
            "parameters": {"deadline_ms": args.deadline_ms},
        }

    async with triton.InferenceServerClient(args.url) as client:
        responses = client.stream_infer(
            requests(),
            stream_timeout=args.deadline_ms / 1000 + 1,
            # Without this header, errors in the stream arrive as text inside an OK response.
            headers={"triton_grpc_error": "true"},
        )
        received = 0
        try:
            async for result, error in responses:
                if error is not None:
                    raise error
                for piece in result.as_numpy("text_output"):
                    yield piece.decode()
                received += 1
                if received == args.cancel_after:
                    responses.cancel()
        except asyncio.CancelledError:  # the iterator raises it after its call was cancelled
            yield f"\n[cancelled after {received} responses]"


async def main(args: argparse.Namespace) -> int:
    """Print the completion. The exit status is 1 if the server ended it with an error."""
    try:
        async for piece in stream_text(args):
            print(piece, end="", flush=True)
    except InferenceServerException as error:
        print(f"\n{error}")
        return 1
    print()
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompt", nargs="?", default="Once upon a time")
    parser.add_argument("--url", default="127.0.0.1:8001", help="Triton's gRPC address")
    parser.add_argument("--model", default="llm", help="name of the Triton model")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--cancel-after", type=int, help="cancel after this many responses (never)")
    parser.add_argument("--deadline-ms", type=int, default=10_000)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main(parse_args())))
