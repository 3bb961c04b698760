"""Event streams over TLS and HTTP/2 through real proxies, by the recipes of docker/proxies."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from h2.errors import ErrorCodes

from protocol import AbortCause
from tests.orchestrator.conftest import MakeService, Service
from tests.support import proxies
from tests.support.certificates import certificates
from tests.support.cutting_proxy import losing_answers
from tests.support.fake_worker import FakeWorker, Plan
from tests.support.h2_client import Exchange, H2Client
from tests.support.proxies import CADDY, ENVOY, HAPROXY, KINDS, Kind

pytestmark = pytest.mark.slow

KEY = {"Authorization": "Bearer the-clients-key"}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
TASK = {"prompt": "hi", "max_tokens": 4}


@pytest.fixture(scope="module", autouse=True)
def made_certificates() -> None:
    """Make what servers show before any event loop runs, which nothing may block."""
    certificates()


@dataclass
class Proxy:
    """A proxy that runs."""

    port: int

    @asynccontextmanager
    async def client(self) -> AsyncIterator[H2Client]:
        """One connection over TLS and HTTP/2."""
        trust = await asyncio.to_thread(
            ssl.create_default_context, cafile=certificates().ca.certificate
        )
        async with H2Client.connected("127.0.0.1", self.port, trust) as client:
            yield client


Front = Callable[..., AbstractAsyncContextManager[Proxy]]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    if not found.is_here:
        how = "make test-clients" if found is ENVOY else f"Debian: apt install {found.name}"
        pytest.skip(f"{found.name} is not here ({how})")
    return found


@pytest.fixture
def front(kind: Kind, tmp_path: Path) -> Front:
    @asynccontextmanager
    async def run(*upstreams: str, **options: Any) -> AsyncIterator[Proxy]:
        async with proxies.running(
            kind, tmp_path, *upstreams, certificate=certificates().server, **options
        ) as port:
            yield Proxy(port)

    return run


@pytest.fixture
async def service(worker: FakeWorker, make_service: MakeService) -> Service:
    """One with a key, as behind a proxy. A stream without tokens is silent: nothing is written to
    it that would tell that its client is gone."""
    return await make_service(worker, token="the-clients-key", streams__keepalive_s=0)


def chat(client: H2Client, **changes: object) -> Exchange:
    return client.post("/v1/chat/completions", CHAT | {"stream": True} | changes, KEY)


async def texts(exchange: Exchange) -> AsyncIterator[str]:
    """What the events of a streamed chat say."""
    async for line in exchange.lines():
        assert exchange.status == 200
        data = line.removeprefix("data: ")
        if data.startswith("{"):
            for choice in json.loads(data)["choices"]:
                if text := choice["delta"].get("content"):
                    yield text


def test_the_proxy_takes_its_recipe(kind: Kind, tmp_path: Path) -> None:
    upstreams = "127.0.0.1:1", "127.0.0.1:2"
    proxies.check(kind, proxies.configure(kind, tmp_path, 8443, upstreams, certificates().server))


async def test_an_event_arrives_before_the_next_is_made(
    service: Service, worker: FakeWorker, front: Front
) -> None:
    plan = worker.does(Plan(stall_at=1))
    async with front(service.url) as proxy, proxy.client() as client:
        answer = texts(chat(client))
        assert await anext(answer) == "w0 "
        assert worker.running == 1  # it is at its second token
        plan.release.set()
        assert [text async for text in answer] == ["w1 ", "w2 ", "w3 "]


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_hang_up_frees_the_slot(
    service: Service, worker: FakeWorker, front: Front, is_streamed: bool
) -> None:
    """One request of a connection is reset; the connection stays, and so do its other streams."""
    plan = worker.does(Plan(stall_at=1))
    async with front(service.url) as proxy, proxy.client() as client:
        other = texts(chat(client))
        assert await anext(other) == "w0 "
        left = chat(client, stream=is_streamed)
        if is_streamed:
            assert await anext(texts(left)) == "w0 "
        await worker.until(lambda: worker.running == 2)
        left.cancel()
        await worker.until(lambda: worker.running == 1)
        assert [cancel.cause for cancel in worker.cancels] == [AbortCause.DISCONNECT]
        plan.release.set()
        assert len([text async for text in other]) == 3


async def test_comments_keep_a_silent_stream_open(
    make_service: MakeService, worker: FakeWorker, front: Front, kind: Kind
) -> None:
    """For longer than the proxy waits for anything."""
    plan = worker.does(Plan(stall_at=1))
    service = await make_service(worker, token="the-clients-key", streams__keepalive_s=0.2)
    changes = {} if kind is CADDY else {"330s": "1s"}  # Caddy has no such time
    async with front(service.url, changes=changes) as proxy, proxy.client() as client:
        exchange, comments = chat(client), 0
        async for line in exchange.lines():
            comments += line.startswith(":")
            if comments == 15:  # of which there are at most ten a second
                plan.release.set()
        assert line == "" and b"[DONE]" in exchange.body
    assert service.outcomes() == ["met"]


async def test_a_post_that_an_orchestrator_drops_is_not_sent_to_another(
    service: Service, worker: FakeWorker, front: Front, kind: Kind
) -> None:
    dropped = 0

    async def drop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal dropped
        with suppress(asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"POST"):
                await reader.readexactly(len(json.dumps(TASK)))
                dropped += 1
            else:  # a look at its health
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(drop, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    taken = refused = 0
    async with (
        server,
        front(f"http://127.0.0.1:{port}", service.url) as proxy,
        proxy.client() as client,
    ):
        while not (refused and taken):
            answer = await client.post("/v2/tasks", TASK, KEY).finished()
            taken += answer.status == 202
            refused += is_lost(answer, kind)
        assert taken + refused <= dropped + taken
    await service.until(lambda: len(service.outcomes()) == taken)
    assert len(worker.submits) == taken and dropped == refused


def is_lost(answer: Exchange, kind: Kind) -> bool:
    """Whether the proxy says that it has no answer from Tidegate."""
    if answer.reset is not None:
        # HAProxy asks clients of HTTP/2 to send again what it got no answer to.
        assert kind is HAPROXY and answer.reset is ErrorCodes.REFUSED_STREAM
    if kind is ENVOY:  # whose 503 is of its own kind, and no word of Tidegate's
        return answer.status == 503 and answer.body.startswith(b"upstream connect error")
    return answer.reset is not None or answer.status == 502


async def test_a_post_goes_to_another_orchestrator_where_one_is_gone(
    service: Service, front: Front, kind: Kind
) -> None:
    """Caddy does not send it there: it asks for health, and leaves out who is gone."""
    gone = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = gone.sockets[0].getsockname()[1]
    gone.close()
    await gone.wait_closed()
    async with front(f"http://127.0.0.1:{port}", service.url) as proxy, proxy.client() as client:
        taken = 0
        while taken < 4:
            answer = await client.post("/v2/tasks", TASK, KEY).finished()
            assert answer.status == 202 or (kind is CADDY and is_lost(answer, kind)), answer
            taken += answer.status == 202
    await service.until(lambda: service.outcomes() == ["met"] * taken)


async def test_a_task_that_is_sent_again_with_its_key_is_made_once(
    service: Service, worker: FakeWorker, front: Front, kind: Kind
) -> None:
    """The proxy loses the answer, and says so; the client cannot know what came of its task."""
    headers = KEY | {"Idempotency-Key": "a"}
    async with (
        losing_answers(service.url, b"202", 1) as losing,
        front(losing) as proxy,
        proxy.client() as client,
    ):
        answers = [await client.post("/v2/tasks", TASK, headers).finished() for _ in range(2)]
    first, again = answers
    # Caddy sends a request again by itself where it has such a key.
    assert is_lost(first, kind) or first.headers["idempotent-replayed"] == "true"
    assert again.status == 202 and again.headers["idempotent-replayed"] == "true"
    await service.until(lambda: service.outcomes() == ["met"])
    assert len(worker.submits) == 1
