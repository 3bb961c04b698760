"""The slot pipeline on the real Triton, by plain ``tritonclient``: a clip in time, one degraded,
refused and cancelled ones, and many at once."""

import asyncio
import io
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton_grpc
from tritonclient.utils import InferenceServerException, shared_memory

from tests.support.stack import Triton, eventually

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
            for name in ("mp4", "wav", "png", "video", "audio", "actor", "preview"):
                tensor = result.as_numpy(name)
                if tensor is not None:
                    answer.tensors[name] = tensor
    return answer


def test_a_clip_is_rendered_in_time(slots: Triton) -> None:
    outputs = "mp4,wav,png,video,audio,actor"
    answer = asyncio.run(render(slots, RECIPE, deadline_ms=60_000, outputs=outputs, preview=True))
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
    assert tensors["preview"].tobytes()[:2] == b"\xff\xd8", "a JPEG, of the portrait at least"


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
                return await render(slots, RECIPE, wanted=wanted, outputs="video", preview=True)
            finally:
                await client.unregister_system_shared_memory("clip")

    try:
        answer = asyncio.run(render_there())
        result = answer.last
        assert result["event"] == "result" and "preview" not in answer.tensors
        assert list(answer.region.shape) == [result["frames"], 3, 96, 96]
        # Once, into Triton's own memory: nothing of it is in the message.
        assert result["copied_bytes"] == result["frames"] * 3 * 96 * 96
        frames = shared_memory.get_contents_as_numpy(region, np.uint8, [size])
        assert frames[: result["copied_bytes"]].mean() > 40 and not frames[-1]
    finally:
        shared_memory.destroy_shared_memory_region(region)


def test_whoever_watches_is_told_the_state(slots: Triton) -> None:
    state = asyncio.run(render(slots, b"", watch=True, until="state")).last
    assert state["slots_total"] == 2 and state["max_size"] == 96 and not state["draining"]
    assert state["stages"]["video"] == state["stages"]["video"] | {"provider": "warp"}
    assert sum(each["bytes"] for each in state["residents"]) == state["memory_used_bytes"]


def test_less_is_rendered_for_a_short_deadline_or_the_reason_is_said(slots: Triton) -> None:
    long = {**RECIPE, "text": "Good morning to everybody. " * 12, "video": {"fps": 24}}
    fine = asyncio.run(render(slots, long, deadline_ms=60_000))
    assert fine.last["seconds"] == 6.0, "the buffers hold no more"
    hopeless = asyncio.run(render(slots, long, deadline_ms=210))
    words = r"deadline_exceeded: plan: 0\.[012] s are left, 0\.2 of them kept"
    assert re.match(words, hopeless.error), hopeless.error
    # Whatever this machine can do, some deadline in between gives less, and all of them an answer.
    given_up: list[str] = []
    for deadline_ms in (6_000, 1_500, 800, 600, 500, 400, 300, 250):
        answer = asyncio.run(render(slots, long, deadline_ms=deadline_ms, on_deadline="degrade"))
        assert answer.error.startswith("deadline_exceeded") or answer.last["event"] == "result"
        given_up += answer.last["given_up"] if answer.events else ["everything"]
    assert given_up


@pytest.mark.parametrize(
    ("recipe", "parameters", "words"),
    [
        (b"{", {}, "invalid_request: recipe: not valid JSON"),
        ({**RECIPE, "schema": "2.0"}, {}, "recipe.schema: 2.0 is not served here"),
        ({**RECIPE, "video": {"fps": 99}}, {}, "recipe.video.fps: expected `int` <= 30"),
        (RECIPE, {"outputs": "gif"}, "outputs: there is no 'gif'"),
        (RECIPE, {"deadline_ms": -1}, "deadline_ms must be a positive number"),
        (RECIPE, {"colour": 1}, "parameters: Object contains unknown field `colour`"),
    ],
)
def test_bad_requests_are_told_what_is_wrong(
    slots: Triton, recipe: Any, parameters: dict[str, Any], words: str
) -> None:
    assert words in asyncio.run(render(slots, recipe, **parameters)).error


@pytest.mark.parametrize("stage", ["audio", "image", "video", "clip"])
def test_a_cancelled_slot_gives_its_buffers_back(slots: Triton, stage: str) -> None:
    async def cancel_some() -> Answer:
        for _ in range(4):  # twice as many as there are buffers
            await render(slots, RECIPE, until=stage)
        return await render(slots, RECIPE, deadline_ms=60_000)

    answer = asyncio.run(cancel_some())
    assert answer.last["event"] == "result" and answer.last["check"]["passed"]


def test_forty_at_once_each_get_one_answer(slots: Triton) -> None:
    short = {**RECIPE, "text": "Hi.", "video": {"fps": 6, "size": 64}}

    async def flood() -> list[Answer]:
        return await asyncio.gather(*(render(slots, short, deadline_ms=60_000) for _ in range(40)))

    answers = asyncio.run(flood())
    outcomes = Counter(a.error.partition(":")[0] or a.last["event"] for a in answers)
    assert set(outcomes) <= {"result", "deadline_exceeded"}, outcomes
    assert outcomes["result"] >= 10
    assert all(a.tensors["mp4"].size for a in answers if not a.error)
    eventually(
        lambda: asyncio.run(render(slots, short, deadline_ms=60_000)).last["event"] == "result",
        "a slot to be rendered afterwards",
    )


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
