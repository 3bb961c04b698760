"""A link to one instance's slot model, which sends its state four times a second.

::

    connect ─▶ watch ─▶ state, state, …  ─▶ broken ─▶ back-off ─▶ connect …
                  └──▶ no such model here: looked for now and then

Now and then the link reconnects: if Triton has reloaded the model, the old one still sends
states here while clips go to the new one; and nothing else shows that it was unloaded.
"""

import asyncio
import random
from typing import Final, Protocol

import msgspec
from google.protobuf.message import DecodeError

from clips.dispatch.wire import METHOD, Answer, BadAnswer, is_absence, read_answer, watch_request
from clips.state import ClipsState
from orchestrator.lanes import LaneConfig
from orchestrator.lanes.config import OPEN_TIMEOUT_S
from orchestrator.lanes.grpc_call import CallEnded, GrpcCall, open_call
from orchestrator.lanes.reconnector import GROWTH, LONGEST_PAUSE_S, Reconnector, SessionEnd

LOOK_AGAIN_S: Final = 5.0
"""Seconds to which pauses between looks at an instance that never had the model may grow."""
RENEW_S = 5.0
"""Seconds after which a watch is restarted."""


class LinkOwner(Protocol):
    """Hears of one link. Called from its reader: must neither wait nor raise."""

    def state_came(self, address: str, state: ClipsState) -> None:
        """The model is there and sent ``state``."""

    def link_closed(self, address: str, reason: str, *, is_absent: bool) -> None:
        """The link is closed; ``is_absent``: because the instance has no slot model."""


class LinkBroken(Exception):
    """The watch has ended; the message says why, for people."""


class ClipLink:
    """Keeps a watch open on the instance at ``address``."""

    def __init__(
        self, address: str, config: LaneConfig, owner: LinkOwner, rng: random.Random
    ) -> None:
        self.address = address
        self._config = config
        self._owner = owner
        self._call: GrpcCall | None = None
        self._first: asyncio.Future[None] | None = None
        self._was_there = False
        """Whether the model is known to have been there: it may be reloading."""
        self._absence = ""
        """Triton's words if it has no slot model; otherwise empty."""
        self._sessions = Reconnector(
            "slot link",
            address,
            self._keep_watching,
            self._session_ended,
            rng=rng,
            expected=(CallEnded, LinkBroken, BadAnswer, DecodeError, msgspec.DecodeError),
        )

    def start(self) -> None:
        """Connect, and keep connected until ``close``."""
        self._sessions.start()

    async def close(self) -> None:
        """Close the link. Idempotent."""
        await self._sessions.close()

    def break_off(self, reason: str) -> None:
        """Close this connection and reconnect."""
        self._sessions.break_off(reason)

    async def _session_ended(self, end: SessionEnd) -> None:
        self._first = None
        if end.is_closed:
            return
        # A closed connection says nothing about the model.
        absence = self._absence if end.error is not None else ""
        looks_seldom = bool(absence) and not self._was_there
        self._sessions.growth = 2.0 if looks_seldom else GROWTH
        self._sessions.longest_pause_s = LOOK_AGAIN_S if looks_seldom else LONGEST_PAUSE_S
        self._owner.link_closed(self.address, absence or end.reason, is_absent=bool(absence))

    async def _keep_watching(self) -> None:
        """Run watch after watch; the model's state stays known in between."""
        while True:
            await self._watch()

    async def _watch(self) -> None:
        """Run one watch until its time is over. Raises if it ends before."""
        self._first = asyncio.get_running_loop().create_future()
        self._absence = ""
        call: GrpcCall | None = None
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                call = await open_call(
                    self.address, METHOD, self._take, self._config.keepalive_s, self._config.tls
                )
                self._call = call
                call.send(watch_request())
                await asyncio.wait([self._first, call.ended], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([call.ended], timeout=RENEW_S)
            if self._absence:
                raise LinkBroken(self._absence)
            if call.ended.done():
                call.ended.result()  # raises
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
        if answer.error:
            if not is_absence(answer.error):
                raise LinkBroken(answer.error)
            self._absence = answer.error
            if self._call is not None:
                self._call.finish()
            return
        if answer.event.get("event") != "state":
            raise BadAnswer(f"expected a state, got {answer.event.get('event')!r}")
        state = msgspec.convert(answer.event, ClipsState)
        if self._first is not None and not self._first.done():
            self._first.set_result(None)
            self._sessions.is_up()
        self._was_there = True
        self._owner.state_came(self.address, state)
