"""Orchestrators are told which instances are ready, and told again (PV-1)."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from catalog.operator_key import keep_key, key_file
from pool.events import PoolEvent
from pool.fleet.registrar import Registrar, Target
from tests.orchestrator.conftest import MakeService, MakeWorker
from tests.support.sites import running_app

PATIENCE_S = 10.0


class FakeOrchestrator:
    """``/v2/instances`` with what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.known: dict[str, float] = {}
        self.keys: set[str | None] = set()
        self.status = 201
        self.said: bytes | None = None
        self.url = ""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v2/instances", self._register)
        app.router.add_delete("/v2/instances/{address}", self._deregister)
        return app

    async def _register(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.keys.add(request.headers.get("Authorization"))
        self.asked.append(f"post {body['address']}")
        if self.status < 300:
            self.known[body["address"]] = body["ttl_s"]
        if self.said is not None:
            return web.Response(body=self.said, status=self.status, content_type="text/html")
        return web.json_response({"error": "no"}, status=self.status)

    async def _deregister(self, request: web.Request) -> web.Response:
        address = request.match_info["address"]
        self.asked.append(f"delete {address}")
        self.known.pop(address, None)
        return web.json_response({})


@pytest.fixture
async def fake() -> AsyncIterator[FakeOrchestrator]:
    fake = FakeOrchestrator()
    async with running_app(fake.app()) as port:
        fake.url = f"http://127.0.0.1:{port}"
        yield fake


def target_at(url: str, key: str = "", ttl_s: float = 45.0) -> Target:
    return Target(url, key, ttl_s)


class Rig:
    """A registrar with these targets, and what it warned of."""

    def __init__(self, *targets: Target) -> None:
        self.warned: list[PoolEvent] = []
        self.registrar = Registrar(self.warned.append)
        self.targets = targets

    async def __aenter__(self) -> "Rig":
        await self.registrar.follow({each.name: each for each in self.targets})
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.registrar.follow({})

    async def tell(self, *addresses: str, within_s: float = PATIENCE_S) -> None:
        self.registrar.set_ready(frozenset(addresses))
        await self.registrar.wait_told(within_s)

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not done():  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)


async def test_what_is_ready_is_told_with_the_key_and_what_is_not_is_taken_off(
    fake: FakeOrchestrator,
) -> None:
    async with Rig(target_at(fake.url, "secret")) as rig:
        await rig.tell("a:1", "[::1]:2")
        assert fake.known == {"a:1": 45.0, "[::1]:2": 45.0}
        assert fake.keys == {"Bearer secret"}
        await rig.tell("[::1]:2")
        assert set(fake.known) == {"[::1]:2"}
        await rig.tell()
        assert fake.known == {} and rig.warned == []


async def test_or25_without_a_key_it_is_the_one_that_is_kept_on_this_machine(
    fake: FakeOrchestrator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path))
    at = urlsplit(fake.url)
    path = key_file(tmp_path, at.hostname or "", at.port or 0)
    keys = [await asyncio.to_thread(keep_key, path)]
    async with Rig(target_at(fake.url)) as rig:
        await rig.tell("a:1")
        await asyncio.to_thread(path.unlink)  # as of one that was restarted
        keys.append(await asyncio.to_thread(keep_key, path))
        await rig.tell("b:1")
    assert fake.keys == {f"Bearer {key}" for key in keys}


async def test_one_that_was_restarted_hears_of_all_within_a_renewal(fake: FakeOrchestrator) -> None:
    async with Rig(target_at(fake.url, ttl_s=0.15)) as rig:
        await rig.tell("a:1", "b:1")
        fake.known.clear()
        await rig.until(lambda: set(fake.known) == {"a:1", "b:1"})


async def test_a_new_manager_tells_nobody_none(fake: FakeOrchestrator) -> None:
    """What an earlier one has told holds until this one knows better."""
    async with Rig(target_at(fake.url)):
        await asyncio.sleep(0.05)
    assert fake.asked == []


async def test_one_that_restarted_is_told_again_once_it_serves(fake: FakeOrchestrator) -> None:
    """The pool's own orchestrator, whose state the manager knows."""
    url = fake.url
    async with Rig(Target("own", "", 45.0, lambda: url)) as rig:
        await rig.tell("a:1")
        fake.known.clear()
        url = ""
        await rig.tell("a:1", "b:1")
        assert fake.known == {}
        url = fake.url
        await rig.tell("a:1", "b:1")
        assert set(fake.known) == {"a:1", "b:1"} and rig.warned == []


async def test_one_that_refuses_is_said_once_and_holds_up_nobody(
    fake: FakeOrchestrator,
) -> None:
    fake.status = 403
    other = FakeOrchestrator()
    async with running_app(other.app()) as port:
        good = target_at(f"http://127.0.0.1:{port}")
        bad = target_at(fake.url, "wrong", 0.06)
        gone = target_at("http://127.0.0.1:9", "", 0.06)
        async with Rig(good, bad, gone) as rig:
            await rig.tell("a:1", within_s=0.3)
            assert set(other.known) == {"a:1"}
            assert set(rig.registrar.errors) == {bad.name, gone.name}
            assert [event.target for event in rig.warned].count(bad.name) == 1
            assert "HTTP 403" in rig.registrar.errors[bad.name]
            assert "admin key" in rig.registrar.errors[bad.name]


async def test_a_real_orchestrator_takes_what_it_is_told(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    worker = await make_worker()
    service = await make_service(
        instances=("127.0.0.1:9",), token="user", admin_token="root", wait=False
    )
    async with Rig(target_at(service.url, "root")) as rig:
        await rig.tell(worker.address)
        assert rig.registrar.errors == {}
        instances = service.orchestrator.registry.instances
        await service.until(lambda: instances[worker.address].ready)
        await rig.tell()
        assert instances[worker.address].retiring_since is not None
