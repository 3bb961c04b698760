"""Stand-ins for Triton's side and for the engine, so that tests decide what happens when."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from protocol import (
    AbortCause,
    Code,
    Frame,
    KvReport,
    LaneMessage,
    WorkerStats,
    decode_frame,
    encode,
)
from protocol import tensors as names
from worker.core import Event, EventSink, Job, StepUnderWay
from worker.errors import ResponderLost
from worker.service.call import Call, Tensors, strings

PATIENCE_S = 100.0
"""How long a test waits for what must come, on a machine that may do something else meanwhile."""


@dataclass
class FakeResponder:
    """Records answers. ``cancelled`` and ``lost`` are set by the test."""

    sent: list[Tensors] = field(default_factory=list)
    error: tuple[Code, str] | None = None
    finals: int = 0
    cancelled: bool = False
    lost: bool = False
    asked_after_final: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def send(self, tensors: Tensors, *, final: bool = False) -> None:
        with self.changed:
            if self.lost:
                self.finals += 1
                raise ResponderLost("the request is dead")
            self.sent.append(tensors)
            self.finals += final
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.finals += 1
            self.changed.notify_all()

    def fail(self, code: Code, message: str) -> None:
        with self.changed:
            self.error = (code, message)
            self.finals += 1
            self.changed.notify_all()

    def is_cancelled(self) -> bool:
        self.asked_after_final |= self.finals > 0
        return self.cancelled

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Until ``condition``; a test that waits in vain says for what."""
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE_S), f"waited in vain for {what}"

    def wait_final(self) -> None:
        self.wait(lambda: self.finals, "the final response")
        assert self.finals == 1

    def refusal(self) -> tuple[Code, str]:
        """Wait for the error that ends it."""
        self.wait_final()
        assert self.error is not None
        return self.error

    def frames(self) -> list[Frame]:
        return [decode_frame(tensors[names.FRAME][0]) for tensors in self.sent]


class FakeEngine:
    """An engine whose events the test makes. Cancels and submissions are recorded."""

    def __init__(self) -> None:
        self.submitted: list[Job] = []
        self.cancelled: list[tuple[Job, AbortCause]] = []
        self.held: list[tuple[Job, bool]] = []
        self.sink: EventSink | None = None
        self.on_cancel: Callable[[Job, AbortCause], None] = lambda job, cause: None
        self.reports: deque[KvReport] = deque()
        self.has_failed = False
        self.step_under_way: StepUnderWay | None = None
        self._changed = threading.Condition()

    def start(self, sink: EventSink) -> None:
        self.sink = sink

    def submit(self, job: Job) -> None:
        with self._changed:
            self.submitted.append(job)
            self._changed.notify_all()

    def cancel(self, job: Job, cause: AbortCause) -> None:
        if job.abort is not None:
            return
        job.abort = cause
        with self._changed:
            self.cancelled.append((job, cause))
            self._changed.notify_all()
        self.on_cancel(job, cause)

    def pause(self, job: Job) -> None:
        self._hold(job, True)

    def resume(self, job: Job) -> None:
        self._hold(job, False)

    def _hold(self, job: Job, held: bool) -> None:
        job.pause_requested = held
        with self._changed:
            self.held.append((job, held))
            self._changed.notify_all()

    def stats(self) -> WorkerStats:
        return WorkerStats(
            kv_blocks_total=8,
            kv_blocks_used=0,
            kv_blocks_free=8,
            running=0,
            waiting=0,
            step_ms=1.0,
            tokens_total=0,
            late_tokens_total=0,
            jobs_total=0,
            check_us=0.1,
        )

    def kv_report(self) -> KvReport | None:
        return self.reports.popleft() if self.reports else None

    def stop(self) -> None:
        pass

    def emit(self, *events: Event) -> None:
        assert self.sink is not None
        self.sink(list(events))

    def wait_submitted(self, count: int) -> list[Job]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.submitted) >= count, PATIENCE_S)
        return self.submitted

    def wait_cancelled(self, count: int) -> list[tuple[Job, AbortCause]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.cancelled) >= count, PATIENCE_S)
        return self.cancelled


def lane_call(message: LaneMessage, responder: FakeResponder) -> Call:
    return Call(
        inputs={names.TEXT_INPUT: strings(b""), names.LANE_MESSAGE: strings(encode(message))},
        parameters={},
        request_id="",
        responder=responder,
    )


def plain_call(text: str, responder: FakeResponder, **inputs: object) -> Call:
    """``inputs`` by name: bool for BOOL[1], str for STRING[1]; ``parameters`` as a dict."""
    parameters = inputs.pop("parameters", {})
    assert isinstance(parameters, dict)
    tensors = {
        name: np.array([value]) if isinstance(value, bool) else strings(str(value))
        for name, value in inputs.items()
    }
    return Call({names.TEXT_INPUT: strings(text)} | tensors, parameters, "", responder)
