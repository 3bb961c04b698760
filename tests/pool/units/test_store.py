"""The store of one launch: for this user alone, and with what it had when it comes back."""

import asyncio
import os
import signal
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio

from catalog.errors import MachineUnfit, StartFailed
from pool.units.store import StoreProcess, find_store


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[StoreProcess]:
    try:
        program = find_store()
    except MachineUnfit as error:
        pytest.skip(str(error))
    process = StoreProcess(program, tmp_path / "data", log=tmp_path / "store.log")
    yield process
    await process.stop(0.0)


def is_there(path: str) -> bool:
    return os.path.exists(path)


async def test_a_store_is_private_and_keeps_what_it_has_taken(
    store: StoreProcess, tmp_path: Path
) -> None:
    await store.start()
    socket = store.url.removeprefix("unix://")
    assert stat.S_IMODE(os.stat(socket).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(tmp_path / "data").st_mode) == 0o700
    async with redis.asyncio.Redis.from_url(store.url, driver_info=None) as client:
        await client.set("promised", "yes")
        assert (await client.config_get("port"))["port"] == "0"
    assert store.pid is not None
    os.kill(store.pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        assert "ended" in await store.lost()
    await store.stop(0.0)
    assert not is_there(socket)
    await store.start()
    async with redis.asyncio.Redis.from_url(store.url, driver_info=None) as client:
        assert await client.get("promised") == b"yes"
    await store.stop(1.0)
    assert not is_there(socket)


async def test_a_store_that_cannot_start_says_why(store: StoreProcess, tmp_path: Path) -> None:
    logs = tmp_path / "data" / "appendonlydir"
    logs.mkdir(parents=True)
    (logs / "appendonly.aof.manifest").write_text("not a manifest\n")
    with pytest.raises(StartFailed, match=r"(?s)store ended with status 1:.*manifest"):
        await store.start()


def test_where_there_is_no_store_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MachineUnfit, match=r"apt-get install redis-server.*TIDEGATE_STATE__URL"):
        find_store()
