"""A lane on virtual time: the real protocol between orchestrator and worker, but without gRPC."""

import asyncio
import random
from functools import partial

from orchestrator.clock import Clock
from orchestrator.lanes import LaneConfig, LaneOwner, StreamLane
from perf.sim.replay.worker import SimWorker
from protocol import (
    PROTOCOL_VERSION,
    Code,
    Frame,
    LaneMessage,
    Open,
    Submit,
    decode_frame,
    encode,
)
from protocol.tensors import FRAME, LANE_MESSAGE
from worker.service.call import Call, Tensors, strings

_MIN_S = 1e-9
_WIRE_S = 0.001
"""Seconds from the orchestrator to the engine's inbox."""


class SimLane(StreamLane):
    """The orchestrator's end of a lane to a ``SimWorker``: no socket, the same messages."""

    def __init__(
        self,
        worker: SimWorker,
        address: str,
        config: LaneConfig,
        owner: LaneOwner,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        super().__init__(address, config, owner, clock, rng)
        self._worker = worker
        self._is_over = False
        self._arrives_at = 0.0
        self._sent_until = 0.0

    def start(self) -> None:
        self._name = f"{self._rng.getrandbits(128):x}"
        self._worker.accept(self._call(Open(PROTOCOL_VERSION, self._name), "open"))

    async def close(self) -> None:
        self.is_open = False
        self._is_over = True
        await asyncio.sleep(0)

    def _post(self, message: LaneMessage, request_id: str) -> None:
        now = self._last_sent_at = self._clock.now()
        if isinstance(message, Submit) and message.budget_ms <= 1000 * _WIRE_S:
            self._worker.started_late += 1
        call = self._call(message, request_id)
        # Timers of one time fire in any order; what is sent first is to arrive first.
        self._sent_until = max(now + _WIRE_S, self._sent_until + _MIN_S)
        self._clock.call_at(self._sent_until, partial(self._worker.accept, call))

    def _call(self, message: LaneMessage, request_id: str) -> Call:
        return Call({LANE_MESSAGE: strings(encode(message))}, {}, request_id, _Responder(self))

    def deliver(self, frame: Frame) -> None:
        """Have a frame arrive, after those before it."""
        way_s = self._worker.way_back_s()
        if not way_s:
            self.take(frame)
            return
        self._arrives_at = max(self._arrives_at, self._clock.now() + way_s)
        self._clock.call_at(self._arrives_at, partial(self.take, frame))

    def take(self, frame: Frame) -> None:
        """Handle a frame as a lane's reader does."""
        if self._is_over:
            return
        self.last_frame_at = self._clock.now()
        self._dispatch(frame)
        self._hand_on_all()
        if not self.sessions_total:
            self.sessions_total += 1
            self.is_open = True
            self._owner.lane_opened(self, frame)
        elif frame.stats is not None:
            self._owner.lane_reported(self, frame)


class _Responder:
    """Brings frames back on the request that opened the lane; those of other requests just end."""

    def __init__(self, lane: SimLane) -> None:
        self._lane = lane

    def send(self, tensors: Tensors, *, final: bool = False) -> None:
        frame = decode_frame(tensors[FRAME][0])
        assert frame.error is None, frame.error
        self._lane.deliver(frame)

    def close(self) -> None:
        """Do nothing: nothing is kept open."""

    def fail(self, code: Code, message: str) -> None:
        raise AssertionError(f"{code}: {message}")

    def is_cancelled(self) -> bool:
        return False
