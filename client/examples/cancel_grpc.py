"""Cancel a running generation, then ask for one with its statistics: plain ``tritonclient``.

    pip install "tritonclient[grpc]"
    python cancel_grpc.py "Once upon a time" --url 127.0.0.1:8001 --cancel-after 8

First a long generation is streamed and cancelled after a few responses: cancelling the iterator
cancels the gRPC call, and the server stops generating. (Leaving the loop without ``cancel()``
would not.) Then a short one is run to its end with the optional outputs switched on: finish
reason, token counts and the log probability of each chosen token.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

STATISTICS = (
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
)


def text_input(name: str, text: str) -> triton.InferInput:
    """A STRING tensor of shape [1]."""
    tensor = triton.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
    return tensor


def flag(name: str, value: bool) -> triton.InferInput:
    """A BOOL tensor of shape [1]."""
    tensor = triton.InferInput(name, [1], "BOOL")
    tensor.set_data_from_numpy(np.array([value]))
    return tensor


async def one_request(model: str, inputs: list[triton.InferInput]) -> AsyncIterator[dict[str, Any]]:
    yield {"model_name": model, "inputs": inputs}


async def cancel_early(client: triton.InferenceServerClient, args: argparse.Namespace) -> None:
    """Stream a generation that would take all of ``--max-tokens`` and stop it."""
    sampling = {"max_tokens": args.max_tokens, "ignore_eos": True, "temperature": 0}
    inputs = [
        text_input("text_input", args.prompt),
        flag("stream", True),
        text_input("sampling_parameters", json.dumps(sampling)),
    ]
    responses = client.stream_infer(one_request(args.model, inputs))
    received = 0
    try:
        async for result, error in responses:
            if error is not None:
                raise error
            print(result.as_numpy("text_output")[0].decode(), end="", flush=True)
            received += 1
            if received == args.cancel_after:
                responses.cancel()
    except asyncio.CancelledError:  # how the iterator tells that its call was cancelled
        print(f"\n[cancelled after {received} responses]")
    else:
        print(f"\n[ended by itself after {received} responses]")


async def with_statistics(client: triton.InferenceServerClient, args: argparse.Namespace) -> None:
    """One response with the whole text and everything that is known about it."""
    sampling = {"max_tokens": 12, "temperature": 0, "logprobs": 1}
    inputs = [
        text_input("text_input", args.prompt),
        flag("stream", False),
        text_input("sampling_parameters", json.dumps(sampling)),
        flag("exclude_input_in_output", True),
        *(flag(name, True) for name in STATISTICS),
    ]
    async for result, error in client.stream_infer(one_request(args.model, inputs)):
        if error is not None:
            raise error
        print(f"text:               {result.as_numpy('text_output')[0].decode()!r}")
        print(f"finish reason:      {result.as_numpy('finish_reason')[0].decode()}")
        print(f"tokens in, out:     {result.as_numpy('num_input_tokens')[0]}", end=", ")
        print(result.as_numpy("num_output_tokens")[0])
        print(f"cumulative logprob: {result.as_numpy('cumulative_logprob')[0]:.4f}")
        print(f"logprobs:           {result.as_numpy('logprobs')[0].decode()}")


async def main(args: argparse.Namespace) -> int:
    """Both demonstrations; the exit status is 1 when the server answered with an error."""
    async with triton.InferenceServerClient(args.url) as client:
        try:
            await cancel_early(client, args)
            await with_statistics(client, args)
        except InferenceServerException as error:
            print(f"\n{error}")
            return 1
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompt", nargs="?", default="Once upon a time")
    parser.add_argument("--url", default="127.0.0.1:8001", help="Triton's gRPC address")
    parser.add_argument("--model", default="llm", help="name of the Triton model")
    parser.add_argument("--max-tokens", type=int, default=1000, help="of the cancelled generation")
    parser.add_argument("--cancel-after", type=int, default=8, help="responses before the cancel")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main(parse_args())))
