"""Every engine that can be built here, and a worker over one, spoken to on a lane."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec

from perf.stack.constants import set_constants
from protocol import (
    PROTOCOL_VERSION,
    Cancel,
    Delta,
    Drain,
    End,
    Feature,
    Grammar,
    LaneMessage,
    OnDeadline,
    Open,
    PromptLogprobs,
    Sampling,
    Submit,
    TokenLogprob,
    WorkerStats,
)
from tests.support.checkpoints import DEMO
from tests.support.triton_calls import FakeResponder, lane_call
from tests.support.vllm_on_cuda import is_interpreted, run_as_on_cuda
from worker.engines import load_engine
from worker.environment import nested
from worker.loaded import LoadedEngine
from worker.service.worker import Worker
from worker.settings import WorkerSettings

MAX_RUNNING = 4
_NAMES = itertools.count()


@dataclass(frozen=True)
class EngineCase:
    """One engine of ``TIDEGATE_WORKER__ENGINE`` on the demo model."""

    name: str
    needs: tuple[str, ...] = ()
    """Modules without which it is skipped."""
    settings: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def missing(self) -> str:
        """Why it cannot be built here; empty where it can."""
        lacking = [module for module in self.needs if find_spec(module) is None]
        return f"{self.name} is not installed here (no {', '.join(lacking)})" if lacking else ""


ENGINES = (
    EngineCase("torch"),
    EngineCase("vllm", ("vllm",), {"engine_args": {"enforce_eager": "true"}}),
)


class Served:
    """A worker over an engine, with a lane of its own for each test."""

    def __init__(self, case: EngineCase) -> None:
        self.case = case
        values = {
            "model_path": DEMO,
            "engine": case.name,
            "device": "cpu",
            "dtype": "float32",
            "max_running": MAX_RUNNING,
            "min_start_budget_ms": 1,
        } | dict(case.settings)
        settings = WorkerSettings(**nested(values))
        if case.name == "vllm" and is_interpreted():
            run_as_on_cuda(settings)
        self._restore = set_constants(
            {"worker.service.worker.HEARTBEAT_S": 0.02, "worker.service.drain.HOLD_S": 0.1}
        )
        self.loaded: LoadedEngine = load_engine(settings)
        self.card = self.loaded.card
        self.worker = Worker(self.loaded, settings)
        self.worker.start()

    def lacks(self, feature: Feature) -> bool:
        return feature in self.card.lacks

    def encode(self, text: str) -> list[int]:
        return self.loaded.tokenizer.encode(text)

    def lane(self) -> "LaneClient":
        return LaneClient(self)

    def send(self, message: LaneMessage) -> FakeResponder:
        responder = FakeResponder()
        self.worker.accept(lane_call(message, responder))
        return responder

    def stats(self) -> WorkerStats:
        """As a lane that is opened now is told."""
        lane = self.lane()
        try:
            stats = lane.responder.frames()[0].stats
        finally:
            lane.lose()
        assert stats is not None
        return stats

    def close(self) -> None:
        self.worker.close()
        self._restore()


class LaneClient:
    """An orchestrator's side of one lane."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.name = f"lane-{next(_NAMES)}"
        self.responder = FakeResponder()
        self._handles = itertools.count(1)
        opening = Open(PROTOCOL_VERSION, self.name)
        served.worker.accept(lane_call(opening, self.responder))
        self.wait = self.responder.wait  # frames come while engines work: no clock is needed
        self.wait(lambda: self.responder.sent or self.responder.error, "the first frame")
        assert self.responder.error is None, self.responder.error
        (frame,) = self.responder.frames()[:1]
        if frame.error is not None:
            raise AssertionError(frame.error.message)

    def submit(
        self,
        prompt: list[int],
        *,
        budget_ms: float = 1e9,
        on_deadline: OnDeadline = OnDeadline.ERROR,
        begun: int = 0,
        grammar: Grammar | None = None,
        **sampling: object,
    ) -> int:
        """The handle of a job, greedy unless it says otherwise."""
        handle = next(self._handles)
        values = {"max_tokens": 16, "temperature": 0.0} | sampling
        parameters = Sampling(**values)  # type: ignore[arg-type]
        message = Submit(
            self.name,
            handle,
            prompt,
            parameters,
            budget_ms,
            on_deadline=on_deadline,
            begun_tokens=begun,
            grammar=grammar,
        )
        self.served.send(message)
        return handle

    def cancel(self, *handles: int) -> None:
        self.served.send(Cancel(self.name, list(handles)))

    def drain(self) -> None:
        self.served.send(Drain(0.0))

    def lose(self) -> None:
        """The orchestrator is gone."""
        self.responder.cancelled = True
        self.wait(lambda: self.responder.finals, "the lane's end")

    def deltas(self, handle: int) -> list[Delta]:
        return [one for f in self.responder.frames() for one in f.deltas if one.handle == handle]

    def ids(self, handle: int) -> list[int]:
        return [i for delta in self.deltas(handle) for i in delta.ids]

    def text(self, handle: int) -> str:
        told = "".join(text for delta in self.deltas(handle) for text in delta.texts)
        return told + self.end(handle).tail

    def logprobs(self, handle: int) -> list[TokenLogprob]:
        return [one for delta in self.deltas(handle) for one in delta.logprobs or []]

    def prompts(self, handle: int) -> list[PromptLogprobs]:
        return [one for f in self.responder.frames() for at, one in f.prompts if at == handle]

    def ends(self, handle: int) -> list[End]:
        return [one for f in self.responder.frames() for one in f.ends if one.handle == handle]

    def begin(self, handle: int, tokens: int = 1) -> None:
        """Wait for its first tokens."""
        self.wait(
            lambda: len(self.ids(handle)) >= tokens or self.ends(handle), f"tokens of job {handle}"
        )

    def end(self, handle: int) -> End:
        """Wait for it; it is the only one, and the last that is said of the job."""
        self.wait(lambda: self.ends(handle), f"the end of job {handle}")
        frames = self.responder.frames()
        last = max(i for i, f in enumerate(frames) if any(e.handle == handle for e in f.ends))
        assert not any(d.handle == handle for f in frames[last + 1 :] for d in f.deltas)
        (end,) = self.ends(handle)
        return end

    def run(self, prompt: list[int], **asked: object) -> "Answer":
        handle = self.submit(prompt, **asked)  # type: ignore[arg-type]
        end = self.end(handle)
        return Answer(self.ids(handle), self.text(handle), end, self.logprobs(handle))


@dataclass(frozen=True)
class Answer:
    ids: list[int]
    text: str
    end: End
    logprobs: list[TokenLogprob]
