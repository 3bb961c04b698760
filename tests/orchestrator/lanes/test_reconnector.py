"""OR-6: session after session with a peer, and what is told of each one's end."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from orchestrator.lanes import reconnector
from orchestrator.lanes.reconnector import Reconnector, SessionEnd


class Gone(Exception):
    """What a peer's failure is known as."""


class Peer:
    """Each session does the next of ``steps``, the last one for ever."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], Awaitable[None]]] = []
        self.ends: list[SessionEnd] = []
        self.sessions = 0
        self.reconnector = Reconnector(
            "lane", "here:1", self._session, self._on_end, rng=random.Random(1), expected=(Gone,)
        )

    async def _session(self) -> None:
        step = self.steps[min(self.sessions, len(self.steps) - 1)]
        self.sessions += 1
        await step()

    async def _on_end(self, end: SessionEnd) -> None:
        self.ends.append(end)

    async def until(self, sessions: int) -> None:
        while self.sessions < sessions:  # noqa: ASYNC110 - turns of the loop are what is waited for
            await asyncio.sleep(0)

    async def fails(self) -> None:
        raise Gone("it went away")

    async def was_up(self) -> None:
        self.reconnector.is_up()
        raise Gone("it went away")

    async def breaks(self) -> None:
        raise ZeroDivisionError

    async def is_silent(self) -> None:
        raise TimeoutError

    async def lasts(self) -> None:
        await asyncio.Event().wait()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those between sessions, in seconds, none of which is waited for."""
    slept: list[float] = []
    sleep = asyncio.sleep

    async def no_sleep(seconds: float) -> None:
        if seconds:
            slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", no_sleep)
    return slept


@pytest.fixture
async def peer(pauses: list[float]) -> AsyncIterator[Peer]:
    peer = Peer()
    yield peer
    await peer.reconnector.close()


async def test_pauses_grow_up_to_the_longest_and_begin_again_once_it_was_up(
    peer: Peer, pauses: list[float]
) -> None:
    peer.steps = [peer.fails] * 20 + [peer.was_up, peer.lasts]
    peer.reconnector.start()
    await peer.until(22)
    first, longest = reconnector.FIRST_PAUSE_S, reconnector.LONGEST_PAUSE_S
    growing = [min(first * 1.1**failures, longest) for failures in range(20)]
    for pause, full in zip(pauses, [*growing, first], strict=True):
        assert full / 2 <= pause <= full
    assert growing[-2:] == [longest, longest]


async def test_each_end_says_why(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    peer.steps = [peer.fails, peer.is_silent, peer.breaks, peer.lasts]
    peer.reconnector.start()
    await peer.until(4)
    peer.reconnector.break_off("the owner said so")
    await peer.until(5)
    reasons = [end.reason for end in peer.ends]
    assert reasons == [
        "it went away",
        "no answer within 5 s",
        "unexpected ZeroDivisionError",
        "the owner said so",
    ]
    assert isinstance(peer.ends[0].error, Gone) and peer.ends[3].error is None
    logged = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.message for record in logged] == ["lane failed unexpectedly; reconnecting"]
    assert logged[0].exc_info is not None, "with its traceback"
