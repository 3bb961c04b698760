"""Render a clip on Triton with plain ``tritonclient``, without importing Tidegate.

    pip install "tritonclient[grpc]"
    python slot_grpc.py "A friendly host says good morning" --out clip.mp4 --deadline-ms 20000

The model ``slot`` takes a recipe (docs/slot.md). It streams its progress, then sends the file.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException


async def render(args: argparse.Namespace) -> dict[str, Any]:
    """Write the clip to ``args.out``; return the server's facts about it."""
    recipe = {"schema": "1.0", "text": args.text, "portrait": {"prompt": args.portrait}}
    given = triton.InferInput("recipe", [1], "BYTES")
    given.set_data_from_numpy(np.array([json.dumps(recipe).encode()], dtype=np.object_))

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {
            "model_name": "slot",
            "inputs": [given],
            "parameters": {"deadline_ms": args.deadline_ms, "on_deadline": args.on_deadline},
        }

    event: dict[str, Any] = {}
    async with triton.InferenceServerClient(args.url) as client:
        responses = client.stream_infer(requests(), stream_timeout=args.deadline_ms / 1000 + 1)
        async for result, error in responses:
            if error is not None:
                raise error
            event = json.loads(result.as_numpy("event")[0])
            if event["event"] == "stage":
                print(f"{event['stage']:>6} {event['percent']:3} %", file=sys.stderr)
            clip = result.as_numpy("mp4")
            if clip is not None:
                args.out.write_bytes(clip.tobytes())
    return event


def main() -> int:
    """Exit with 0 for a clip; with 1 if Triton refused it or ran out of time, and said why."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", help="what is said")
    parser.add_argument("--portrait", default="a friendly host", help="who says it")
    parser.add_argument("--out", type=Path, default=Path("clip.mp4"))
    parser.add_argument("--url", default="127.0.0.1:8001", help="Triton's gRPC address")
    parser.add_argument("--deadline-ms", type=int, default=45_000)
    parser.add_argument("--on-deadline", choices=("error", "degrade"), default="degrade")
    args = parser.parse_args()
    try:
        print(json.dumps(asyncio.run(render(args)), indent=1))
    except InferenceServerException as error:
        print(error.message(), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
