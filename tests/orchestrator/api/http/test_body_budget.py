"""Bodies that are still arriving share one budget: bytes count as they come, and no body waits."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from aiohttp import web
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from orchestrator.api.http import body
from orchestrator.api.http.body import BODIES, BodyBudget, BodyShare
from orchestrator.api.server import READ_BUFFER_BYTES
from orchestrator.errors import BodyTooSlow, InvalidRequest, NoCapacity
from tests.orchestrator.conftest import MakeService, Service
from tests.support.fake_worker import FakeWorker

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]
PART = b'{"prompt": "' + b"x" * 60000
TASK = b'{"prompt": "x", "max_tokens": 1}'


class Books(RuleBasedStateMachine):
    """Bodies come, grow, become whole and go in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = BodyBudget(100)
        self.open: list[tuple[BodyShare, ExitStack]] = []

    @rule()
    def come(self) -> None:
        stack = ExitStack()
        self.open.append((stack.enter_context(self.budget.share(lambda: None)), stack))

    @rule(at=strategies.integers(0, 9), count=strategies.integers(1, 120))
    def grow(self, at: int, count: int) -> None:
        self._try(at, lambda share: share.take(count))

    @rule(at=strategies.integers(0, 9))
    def become_whole(self, at: int) -> None:
        self._try(at, lambda share: share.finish())

    @rule(at=strategies.integers(0, 9))
    def go(self, at: int) -> None:
        if self.open:
            self.open.pop(at % len(self.open))[1].close()

    def _try(self, at: int, act: Callable[[BodyShare], None]) -> None:
        if not self.open:
            return
        share, stack = self.open[at % len(self.open)]
        try:
            act(share)
        except NoCapacity:
            stack.close()
            self.open.remove((share, stack))

    @invariant()
    def add_up(self) -> None:
        self.budget.check_integrity()
        assert self.budget.total_bytes == sum(share.held_bytes for share, _ in self.open)


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)


# ── over HTTP ────────────────────────────────────────────────────────────────────────────────


async def begin(service: Service, length: int, data: bytes) -> Client:
    """A client of a body of ``length`` bytes that has sent its beginning."""
    reader, writer = await asyncio.open_connection(*service.runner.addresses[0][:2])
    writer.write(
        b"POST /v2/tasks HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (length, data)
    )
    return reader, writer


async def answer_to(client: Client) -> bytes:
    return await client[0].readuntil(b"\r\n\r\n")


async def test_bodies_that_never_end_take_no_more_than_the_budget(
    make_service: MakeService, worker: FakeWorker
) -> None:
    service = await make_service(worker, http__max_body_bytes=65536)
    budget = service.runner.app[BODIES]
    budget.most_bytes = 4 * 65536
    large = [await begin(service, 65536, PART) for _ in range(12)]
    answers = [asyncio.create_task(answer_to(client)) for client in large]
    await service.until(lambda: sum(answer.done() for answer in answers) >= 8)
    assert budget.total_bytes <= budget.most_bytes
    refused = next(answer.result() for answer in answers if answer.done())
    assert refused.startswith(b"HTTP/1.1 503 ") and b"\r\nRetry-After: 1\r\n" in refused
    # what is small gets through next to them, and a large one that ends does too
    error = await service.refused(400, "/v2/tasks", json={"prompt": "x" * 30000})
    assert "context" in error["message"]
    await service.ask(
        "POST", "/v2/tasks", 202, data=TASK, headers={"Content-Type": "application/json"}
    )
    for _, writer in large:
        writer.close()
    await service.until(lambda: budget.total_bytes == 0)
    await asyncio.gather(*answers, return_exceptions=True)
    labels = {"status": "503", "code": "no_capacity"}
    assert service.metric("tidegate_http_errors_total", **labels) >= 8


async def test_what_has_come_gives_a_body_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.01)
    patience = body.Patience()
    patience.came(2**30)
    await patience.read(asyncio.sleep(0.05))
    patience.end()
    with pytest.raises(BodyTooSlow):
        await patience.read(asyncio.sleep(60.0))


@pytest.mark.parametrize("end", ["refused", "too slow", "client gone", "served"])
async def test_the_room_is_given_back_however_it_ends(
    make_service: MakeService, worker: FakeWorker, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if end == "too slow":
        monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.05)
    service = await make_service(worker, http__max_body_bytes=65536)
    budget = service.runner.app[BODIES]
    length = 200 if end == "refused" else 65536 if end != "served" else len(TASK)
    client = await begin(service, length, b"{" * 200 if end == "refused" else TASK)
    if end == "client gone":
        await service.until(lambda: budget.total_bytes > 0)
    else:
        status = {"refused": b"400", "too slow": b"408", "served": b"202"}[end]
        assert (await answer_to(client)).startswith(b"HTTP/1.1 " + status)
    client[1].close()
    await service.until(lambda: budget.total_bytes == 0)


async def test_what_nobody_reads_is_not_buffered_outside_the_budget(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read of the socket brings up to 256 KiB; a connection then waits for its reader."""
    held = []

    async def stand_still(request: web.Request, *_: object) -> None:
        await asyncio.sleep(0.1)
        held.append(request.content._size)
        raise InvalidRequest("not read")

    monkeypatch.setattr("orchestrator.api.native.routes.read_body", stand_still)
    client = await begin(service, 4_000_000, 50 * PART)
    assert (await answer_to(client)).startswith(b"HTTP/1.1 400 ")
    assert held[0] <= 2 * READ_BUFFER_BYTES + 2**18
    client[1].close()
