"""How many connections there may be, in all and of one key."""

import asyncio
from contextlib import ExitStack

import pytest

from orchestrator.api.auth import Key, digest_of
from orchestrator.api.http import accepting
from orchestrator.api.http.accepting import most_connections
from orchestrator.api.server import KEY_SHARES
from tests.orchestrator.conftest import MakeService
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker


async def test_or4_clients_beyond_the_limit_are_told_so_and_not_reset(
    worker: FakeWorker, make_service: MakeService
) -> None:
    service = await make_service(worker, http__max_connections=32)
    host, _, port = service.url.removeprefix("http://").partition(":")
    heads, is_over = list[bytes](), asyncio.Event()

    async def ask() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /v2/tasks HTTP/1.1\r\nHost: localhost\r\n\r\n")
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        await is_over.wait()
        writer.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(60):
            group.create_task(ask())
        await service.until(lambda: len(heads) == 60)
        is_over.set()
    told = [head for head in heads if head.startswith(b"HTTP/1.1 503")]
    assert len(told) == 60 - 12 and all(b"Retry-After: 1" in head for head in told)
    assert all(head.startswith(b"HTTP/1.1 200") for head in heads if head not in told)


@for_each(("files", "most"), [(64, 32), (256, 128), (1024, 768), (65536, 65280)])
async def test_some_open_files_are_never_connections(
    monkeypatch: pytest.MonkeyPatch, files: int, most: int
) -> None:
    monkeypatch.setattr(accepting, "raise_file_limit", lambda: files)
    assert most_connections() == most


async def test_or24_one_key_leaves_connections_for_the_others(
    worker: FakeWorker, make_service: MakeService
) -> None:
    """From however many addresses; without a second key there is nobody to share with."""
    keys = {name: {"token": f"sk-{name}"} for name in ("many", "other")}
    service = await make_service(worker, http__max_connections=40, keys=keys)
    app = service.runner.app
    assert app is not None
    mine, shares = Key("many", digest_of("sk-many")).fingerprint, app[KEY_SHARES]

    async def status_with(key: str) -> int:
        headers = {"x-api-key": f"sk-{key}"}
        async with service.http.get("/v2/tasks", headers=headers) as response:
            return response.status

    with ExitStack() as under_way:
        for _ in range(17):
            under_way.enter_context(shares.counted(mine))
        assert [await status_with("many"), await status_with("other")] == [200, 200]
        under_way.enter_context(shares.counted(mine))
        assert [await status_with("many"), await status_with("other")] == [503, 200]
    assert await status_with("many") == 200
