"""A link to one instance's slot model: its state, as it tells it four times a second.

::

    connect ─▶ watch ─▶ state, state, …  ─▶ broken ─▶ back-off ─▶ connect …
                  └──▶ an error: a model that cannot tell is asked again and again, as a heartbeat
                  └──▶ no such model here: looked for now and then

Now and then it connects anew: when Triton has loaded the model anew, the old one goes on with its
states here, while slots go to the new one; when it was unloaded, nothing else would tell.
"""

import asyncio
import random
from contextlib import suppress
from typing import Final, Protocol

import msgspec
from google.protobuf.message import DecodeError

from orchestrator.clock import Clock
from orchestrator.lanes import LaneConfig
from orchestrator.lanes.grpc_call import CallEnded, GrpcCall, open_call
from orchestrator.slots.wire import (
    METHOD,
    Answer,
    BadAnswer,
    is_absence,
    read_answer,
    watch_request,
)
from orchestrator.telemetry.log import fields, lane_log
from worker.protocol.slot import SlotState

ASK_AGAIN_S: Final = 0.5
"""A model that cannot tell its state is asked for it this often."""
LOOK_AGAIN_S: Final = 5.0
"""An instance that never had the model is looked at this often at least."""
RENEW_S = 5.0
"""A watch is begun anew after this."""


class LinkOwner(Protocol):
    """Hears of one link. Called from its reader: must neither wait nor raise."""

    def state_came(self, address: str, state: SlotState | None) -> None:
        """The model is there; None: it cannot tell its state."""

    def link_closed(self, address: str, reason: str, *, is_absent: bool) -> None:
        """Nothing is known of it any more; ``is_absent``: the instance has no slot model."""


class _Renewed(Exception):
    """The watch has done its time."""


class LinkBroken(Exception):
    """The watch has ended; the message says why, for people."""


class SlotLink:
    """Keeps a watch open on the instance at ``address``."""

    def __init__(
        self, address: str, config: LaneConfig, owner: LinkOwner, clock: Clock, rng: random.Random
    ) -> None:
        self.address = address
        self._config = config
        self._owner = owner
        self._clock = clock
        self._rng = rng
        self._call: GrpcCall | None = None
        self._first: asyncio.Future[None] | None = None
        self._was_there = False
        """The model is known to have been there: it may be being loaded anew."""
        self._absence = ""
        """What Triton said, where it has no slot model."""
        self._breaking = ""
        """Why ``break_off`` ended the last session that it ended."""
        self._runner: asyncio.Task[None] | None = None
        self._session: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connect, and keep connected until ``close``."""
        self._runner = asyncio.create_task(self._run(), name=f"slot link {self.address}")

    async def close(self) -> None:
        """Idempotent."""
        if self._runner is not None:
            self._runner.cancel()
            with suppress(asyncio.CancelledError):
                await self._runner
            self._runner = None

    def break_off(self, reason: str) -> None:
        """Give this connection up and connect anew."""
        if self._session is not None:
            self._breaking = reason
            self._session.cancel()

    async def _run(self) -> None:
        config = self._config
        pause = config.reconnect_min_s
        while True:
            session = self._session = asyncio.create_task(self._watch())
            try:
                await asyncio.wait([session])
            finally:
                session.cancel()
                await asyncio.wait([session])
                self._session = None
            if isinstance(_failure_of(session), _Renewed):
                continue  # what is known of it stays known meanwhile
            reason, is_absent = self._why(session)
            had_state = self._first is not None and self._first.done()
            self._first = None
            self._owner.link_closed(self.address, reason, is_absent=is_absent)
            if had_state:
                pause = config.reconnect_min_s
            await asyncio.sleep(pause * self._rng.uniform(0.5, 1.0))
            is_no_slot_server = is_absent and not self._was_there
            most_s = LOOK_AGAIN_S if is_no_slot_server else 0.0
            pause = min(2 * pause, max(most_s, config.reconnect_max_s))

    def _why(self, session: "asyncio.Task[None]") -> tuple[str, bool]:
        if session.cancelled():
            return self._breaking or "the watch was cancelled", False
        if self._absence:
            return self._absence, True
        error = _failure_of(session)
        if isinstance(error, TimeoutError):
            return f"no answer within {self._config.open_timeout_s:g} s", False
        known = (CallEnded, LinkBroken, BadAnswer, DecodeError, msgspec.DecodeError)
        if not isinstance(error, known):
            lane_log.error(
                "slot link failed unexpectedly; reconnecting",
                exc_info=error,
                extra=fields(instance=self.address),
            )
        return str(error), False

    async def _watch(self) -> None:
        self._first = asyncio.get_running_loop().create_future()
        self._absence = ""
        call: GrpcCall | None = None
        try:
            async with asyncio.timeout(self._config.open_timeout_s):
                call = await open_call(self.address, METHOD, self._take, self._config.keepalive_s)
                self._call = call
                call.send(watch_request())
                await asyncio.wait([self._first, call.ended], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([call.ended], timeout=RENEW_S)
            if not call.ended.done() and not self._absence:
                raise _Renewed
            call.ended.result()
        finally:
            self._call = None
            if call is not None:
                await call.close()

    def _take(self, messages: list[bytes]) -> None:
        for message in messages:
            answer = read_answer(message)
            if answer is not None:
                self._take_answer(answer)

    def _take_answer(self, answer: Answer) -> None:
        state: SlotState | None = None
        if answer.error:
            if is_absence(answer.error):
                self._absence = answer.error
                if self._call is not None:
                    self._call.finish()
                return
            if answer.error.startswith(("cancelled", "draining")):
                raise LinkBroken(answer.error)
            call = self._call
            self._clock.call_at(self._clock.now() + ASK_AGAIN_S, lambda: self._ask_again(call))
        elif answer.event.get("event") != "state":
            raise BadAnswer(f"expected a state, got {answer.event.get('event')!r}")
        else:
            state = msgspec.convert(answer.event, SlotState)
        if self._first is not None and not self._first.done():
            self._first.set_result(None)
        self._was_there = True
        self._owner.state_came(self.address, state)

    def _ask_again(self, call: GrpcCall | None) -> None:
        if call is not None and call is self._call:
            call.send(watch_request())


def _failure_of(session: "asyncio.Task[None]") -> BaseException | None:
    return None if session.cancelled() else session.exception()
