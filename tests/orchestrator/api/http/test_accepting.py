"""How many connections there may be, in all and of one key."""

import asyncio
import errno
import socket
from contextlib import ExitStack

import pytest

from orchestrator.api.auth import Key, digest_of
from orchestrator.api.http import accepting
from orchestrator.api.http.accepting import Port
from orchestrator.api.server import KEY_SHARES
from tests.orchestrator.conftest import MakeService
from tests.support.fake_worker import FakeWorker


async def test_a_port_that_is_closed_while_no_file_is_left_stays_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = asyncio.Event()

    def refuse(_: socket.socket) -> None:
        refused.set()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", refuse)
    monkeypatch.setattr(accepting, "RETRY_S", accepting.READ_S / 2)
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, failure: failures.append(failure))
    port = await Port.open("127.0.0.1", 0, asyncio.Protocol)
    _, writer = await asyncio.open_connection(*port.sockets[0].getsockname())
    await refused.wait()
    port.close()
    await port.wait_closed()
    writer.close()
    assert not failures


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
        return (await service.answer("GET", "/v2/tasks", headers=headers))[0]

    with ExitStack() as under_way:
        for _ in range(17):
            under_way.enter_context(shares.counted(mine))
        assert [await status_with("many"), await status_with("other")] == [200, 200]
        under_way.enter_context(shares.counted(mine))
        assert [await status_with("many"), await status_with("other")] == [503, 200]
    assert await status_with("many") == 200
