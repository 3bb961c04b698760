"""The slot pipeline on the real Triton, by plain ``tritonclient``: a clip in time, one degraded,
refused and cancelled ones, and many at once."""

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton_grpc
from tritonclient.utils import InferenceServerException, shared_memory

from tests.support.stack import Triton

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]

RECIPE: dict[str, Any] = {
    "schema": "1.0",
    "text": "Good morning to everybody.",
    "portrait": {"prompt": "a friendly host, red hair, forest background", "seed": 5},
    "video": {"fps": 12},
}


@dataclass
class Answer:
    """What came of one recipe."""

    events: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    region: Any = None
    """What Triton says of the output ``video``."""

    @property
    def last(self) -> dict[str, Any]:
        return self.events[-1]


async def render(
    triton: Triton,
    recipe: dict[str, Any] | bytes,
    *,
    until: str = "",
    wanted: list[Any] | None = None,
    **parameters: Any,
) -> Answer:
    """``until``: give up once this stage has said something, or at this event. ``wanted``: what
    ``tritonclient`` calls outputs."""
    data = recipe if isinstance(recipe, bytes) else json.dumps(recipe).encode()
    given = triton_grpc.InferInput("recipe", [1], "BYTES")
    given.set_data_from_numpy(np.array([data], dtype=np.object_))

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {
            "model_name": "slot",
            "inputs": [given],
            "outputs": wanted,
            "parameters": parameters or None,
        }

    answer = Answer()
    async with triton_grpc.InferenceServerClient(triton.grpc) as client:
        responses = client.stream_infer(requests(), headers={"triton_grpc_error": "false"})
        async for result, error in responses:
            if error is not None:
                assert isinstance(error, InferenceServerException)
                answer.error = str(error.message())
                break
            answer.events.append(json.loads(result.as_numpy("event")[0]))
            if until and until in (answer.last.get("stage"), answer.last["event"]):
                responses.cancel()
                break
            answer.region = result.get_output("video")
            if wanted:
                continue
            for name in ("mp4", "wav", "png", "video", "audio", "actor"):
                tensor = result.as_numpy(name)
                if tensor is not None:
                    answer.tensors[name] = tensor
    return answer


def test_a_clip_is_rendered_in_time(slots: Triton) -> None:
    outputs = "mp4,wav,png,video,audio,actor"
    answer = asyncio.run(render(slots, RECIPE, deadline_ms=60_000, outputs=outputs))
    assert not answer.error
    result, tensors = answer.last, answer.tensors
    assert result["event"] == "result" and result["deadline_met"] and result["given_up"] == []
    assert result["check"]["passed"] and len(result["check"]["models"][0]["scores"]) == 5
    assert all(result[f"{stage}_ms"] > 0 for stage in ("audio", "image", "video", "clip", "total"))
    assert {event["stage"] for event in answer.events[:-1]} == {"audio", "image", "video", "clip"}
    # Sound and picture are as long as each other, in tensors and in the file.
    samples, frames = tensors["audio"].size, tensors["video"].shape[0]
    assert 0.8 < samples / 24_000 < 4 and frames == -(-samples * 12 // 24_000) == result["frames"]
    assert tensors["video"].mean() > 40 and np.abs(tensors["audio"]).max() > 0.5
    import av

    with av.open(io.BytesIO(tensors["mp4"].tobytes())) as file:
        assert sum(1 for _ in file.decode(video=0)) == frames
    assert tensors["wav"].tobytes()[:4] == b"RIFF" and tensors["png"].tobytes()[1:4] == b"PNG"


def test_frames_travel_through_the_clients_shared_memory(slots: Triton) -> None:
    size = 6 * 12 * 3 * 96 * 96
    region = shared_memory.create_shared_memory_region("clip", f"/tidegate_{os.getpid()}", size)

    async def render_there() -> Answer:
        async with triton_grpc.InferenceServerClient(slots.grpc) as client:
            await client.register_system_shared_memory("clip", f"/tidegate_{os.getpid()}", size)
            event, video = (triton_grpc.InferRequestedOutput(name) for name in ("event", "video"))
            video.set_shared_memory("clip", size)
            wanted = [event, video]
            try:
                return await render(slots, RECIPE, wanted=wanted, outputs="video")
            finally:
                await client.unregister_system_shared_memory("clip")

    try:
        answer = asyncio.run(render_there())
        result = answer.last
        assert result["event"] == "result"
        assert list(answer.region.shape) == [result["frames"], 3, 96, 96]
        # Once, into Triton's own memory: nothing of it is in the message.
        assert result["copied_bytes"] == result["frames"] * 3 * 96 * 96
        frames = shared_memory.get_contents_as_numpy(region, np.uint8, [size])
        assert frames[: result["copied_bytes"]].mean() > 40 and not frames[-1]
    finally:
        shared_memory.destroy_shared_memory_region(region)


def test_the_example_script_writes_a_clip(slots: Triton, tmp_path: Path) -> None:
    def run(*options: str) -> subprocess.CompletedProcess[str]:
        script = ROOT / "client" / "examples" / "slot_grpc.py"
        command = [sys.executable, str(script), "Good morning.", "--url", slots.grpc, *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=100)

    out = tmp_path / "clip.mp4"
    done = run("--out", str(out))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["deadline_met"] and "video 100 %" in done.stderr
    assert out.read_bytes()[4:8] == b"ftyp"
    late = run("--deadline-ms", "150", "--on-deadline", "error")
    assert late.returncode == 1 and late.stderr.startswith("deadline_exceeded: plan:")
