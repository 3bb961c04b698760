"""A slot model that can be made to fail on demand, next to ``fake_worker``'s text model.

What a slot does is its ``FakePlan``; by default each stage is begun and done at once.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tritonclient.grpc import service_pb2

from clips.dispatch.service import Clips
from clips.extension import ClipsRoom
from clips.plan.budgets import ClipStage
from clips.state import ClipsState, StageState
from orchestrator.service import Orchestrator
from tests.support.rooms import room

MP4 = b"\x00\x00\x00\x18ftypisom" + bytes(range(256)) * 40
WAV = b"RIFF" + bytes(1000)
PNG = b"\x89PNG" + bytes(500)
FILES = {"mp4": MP4, "wav": WAV, "png": PNG}

Write = Callable[[service_pb2.ModelStreamInferResponse], Awaitable[None]]


def make_state(**changes: Any) -> ClipsState:
    """Of an instance that takes 10 ms for a stage, whatever the recipe."""
    state = ClipsState(
        max_size=256,
        max_seconds=20.0,
        buffer_s=0.1,
        slots_total=2,
        slots_free=2,
        waiting=0,
        max_waiting=64,
        free_in_s=(),
        stages={stage.value: StageState("fake", 0.01) for stage in ClipStage},
        memory_used_bytes=1000,
        abort_to_free_p50_ms=12.5,
        abort_to_free_p99_ms=50.0,
    )
    return msgspec.structs.replace(state, **changes)


@dataclass
class FakePlan:
    """What one slot does."""

    hold_at: str = ""
    """Waits in the middle of this stage until ``release`` is set."""
    release: asyncio.Event = field(default_factory=asyncio.Event)
    die_at: str = ""
    """Breaks the whole stream in this stage."""
    error_at: str = ""
    error: str = ""
    """Ends in this stage with this, ``code: message``; at once where no stage is named."""
    saved: bool = False
    """Before its error it tells what there is of it."""
    given_up: tuple[str, ...] = ()
    spared: bool = False
    steps: tuple[int, ...] = (0, 50, 100)


@dataclass
class ClipCall:
    """One request that arrived."""

    recipe: dict[str, Any]
    parameters: dict[str, Any]
    request_id: str


class FakeClips:
    """The model's side of any number of streams."""

    def __init__(self, **state: Any) -> None:
        self.state = make_state(**state)
        self.plan: Callable[[ClipCall], FakePlan] = lambda call: FakePlan()
        self.calls: list[ClipCall] = []
        self.watches = 0
        self.cancelled = 0
        """Whose streams ended before they did."""
        self.running = 0
        self.is_silent = False

    def does(self, plan: FakePlan) -> FakePlan:
        """Every slot does the same from now on, until its ``release`` is set where it holds."""
        self.plan = lambda call: plan
        return plan

    async def serve(self, request: Any, write: Write, die: Callable[[], None]) -> None:
        """Answer one request."""
        parameters = {
            name: getattr(value, str(value.WhichOneof("parameter_choice")))
            for name, value in request.parameters.items()
        }
        if parameters.pop("watch", False):
            await self._watch(request, write)
            return
        call = ClipCall(json.loads(request.raw_input_contents[0][4:]), parameters, request.id)
        self.calls.append(call)
        self.running += 1
        try:
            await self._render(call, self.plan(call), write, die)
        except BaseException:  # also what a write on a stream that is gone raises
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _watch(self, request: Any, write: Write) -> None:
        self.watches += 1
        while True:
            if not self.is_silent:
                free = max(0, self.state.slots_free - self.running)
                state = msgspec.structs.replace(self.state, slots_free=free)
                told = {"event": "state"} | msgspec.to_builtins(state)
                await write(answer(told))
            await asyncio.sleep(0.02)

    async def _render(
        self, call: ClipCall, plan: FakePlan, write: Write, die: Callable[[], None]
    ) -> None:
        if plan.error and not plan.error_at:
            await write(failure(plan.error, call.request_id))
            return
        for stage in ClipStage:
            for percent in plan.steps:
                event = {"event": "stage", "stage": stage.value, "percent": percent}
                await write(answer(event))
                if percent == plan.steps[0] and stage == plan.hold_at:
                    await plan.release.wait()
            if stage == plan.die_at:
                die()
                await asyncio.Event().wait()
            if stage == plan.error_at:
                if plan.saved:
                    await write(answer({"event": "saved", **facts(())}, self._files(call)))
                await write(failure(plan.error, call.request_id))
                return
        result = {"event": "result", **facts(plan.given_up), "spared": plan.spared}
        await write(answer(result, self._files(call)))

    def _files(self, call: ClipCall) -> dict[str, bytes]:
        return {name: FILES[name] for name in str(call.parameters["outputs"]).split(",")}


def facts(given_up: tuple[str, ...]) -> dict[str, Any]:
    times = {f"{stage.value}_ms": 10.0 for stage in ClipStage}
    return {
        "seconds": 2.0,
        "frames": 24,
        "fps": 12,
        "size": 96,
        "given_up": list(given_up),
        "check": None,
        "deadline_met": True,
        "total_ms": 40.0,
        **times,
    }


def answer(event: dict[str, Any], tensors: dict[str, bytes] | None = None) -> Any:
    return response("slot", {"event": json.dumps(event).encode()}, tensors)


def response(model: str, texts: dict[str, bytes], tensors: dict[str, bytes] | None = None) -> Any:
    """As Triton has it: a string for each of ``texts``, and bytes for each of ``tensors``."""
    outputs = [(n, "BYTES", 1, len(b).to_bytes(4, "little") + b) for n, b in texts.items()]
    outputs += [(name, "UINT8", len(raw), raw) for name, raw in (tensors or {}).items()]
    tensor = service_pb2.ModelInferResponse.InferOutputTensor
    return service_pb2.ModelStreamInferResponse(
        infer_response=service_pb2.ModelInferResponse(
            model_name=model,
            outputs=[tensor(name=n, datatype=kind, shape=[size]) for n, kind, size, _ in outputs],
            raw_output_contents=[raw for *_, raw in outputs],
        )
    )


def failure(message: str, request_id: str) -> Any:
    return service_pb2.ModelStreamInferResponse(
        error_message=message, infer_response=service_pb2.ModelInferResponse(id=request_id)
    )


def clips_of(orchestrator: Orchestrator) -> Clips:
    """The clips of an orchestrator that serves them."""
    return room(orchestrator, ClipsRoom).clips
