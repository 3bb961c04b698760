"""The slot pipeline on the real Triton, by plain ``tritonclient``: a clip in time, one degraded,
refused and cancelled ones, and many at once."""

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton_grpc

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


async def render(triton: Triton, recipe: dict[str, Any], **parameters: Any) -> Answer:
    given = triton_grpc.InferInput("recipe", [1], "BYTES")
    given.set_data_from_numpy(np.array([json.dumps(recipe).encode()], dtype=np.object_))

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "slot", "inputs": [given], "parameters": parameters}

    answer = Answer()
    async with triton_grpc.InferenceServerClient(triton.grpc) as client:
        async for result, error in client.stream_infer(requests()):
            assert error is None, error
            answer.events.append(json.loads(result.as_numpy("event")[0]))
            for name in ("mp4", "wav", "png", "video", "audio", "actor"):
                tensor = result.as_numpy(name)
                if tensor is not None:
                    answer.tensors[name] = tensor
    return answer


def test_a_clip_is_rendered_in_time(slots: Triton) -> None:
    outputs = "mp4,wav,png,video,audio,actor"
    answer = asyncio.run(render(slots, RECIPE, deadline_ms=60_000, outputs=outputs))
    result, tensors = answer.events[-1], answer.tensors
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
