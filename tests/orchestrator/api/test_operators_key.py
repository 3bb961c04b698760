"""Operators' calls need a secret even where no key is set, so no lane token gets out (OR-25)."""

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest

from catalog.operator_key import access
from tests.orchestrator.api.conftest import log_until, start_process
from tests.orchestrator.conftest import OPERATOR, MakeService, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker

STRANGER = {"X-Tidegate-Admin": "1"}


async def test_a_stranger_on_this_machine_is_not_sent_the_lane_token(
    worker: FakeWorker, make_service: MakeService
) -> None:
    service = await make_service(worker, lanes__token="the-lanes-secret")
    reached = asyncio.Event()

    def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.set()
        writer.close()

    listening = await asyncio.start_server(take, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()
    body = {"address": f"{host}:{port}", "ttl_s": 60}
    for headers in ({}, STRANGER, {"Authorization": "Bearer "}, {"x-api-key": "1"}):
        await service.ask("POST", "/v2/instances", 401, json=body, headers=headers)
    assert list(service.orchestrator.registry.instances) == [worker.address]
    assert not reached.is_set()
    await service.ask("POST", "/v2/instances", 201, json=body, headers=OPERATOR)
    await reached.wait()
    listening.close()
    await listening.wait_closed()


@for_each(
    ("method", "path"),
    [
        ("GET", "/admin/drain"),
        ("POST", "/admin/drain"),
        ("POST", "/admin/undrain"),
        ("POST", "/admin/reload"),
        ("POST", "/v2/instances"),
        ("DELETE", "/v2/instances/x:1"),
        ("POST", "/v2/instances/x:1/drain"),
        ("POST", "/v2/instances/x:1/undrain"),
        ("POST", "/v2/instances/x:1/swap"),
        ("POST", "/v2/instances/x:1/reload"),
        ("POST", "/v2/catalog/models/x/verify"),
        ("POST", "/v2/catalog/engines/x/verify"),
    ],
)
async def test_every_call_that_operates_asks_for_it(
    service: Service, method: str, path: str
) -> None:
    told = (await service.ask(method, path, 401, headers=STRANGER))["error"]["message"]
    assert " TIDEGATE_HOME/operator " in told, "a stranger learns no path of the machine"
    async with service.http.request(method, path, headers=OPERATOR) as response:
        assert response.status not in (401, 403)


async def test_with_tokens_and_no_admins_it_operates_and_no_token_does(
    worker: FakeWorker, make_service: MakeService
) -> None:
    service = await make_service(worker, token="t")
    for headers, status in (({}, 401), ({"Authorization": "Bearer t"}, 403), (OPERATOR, 200)):
        await service.ask("POST", "/admin/undrain", status, headers=headers)
    await service.ask("GET", "/v2/tasks", headers=OPERATOR)


async def test_an_admins_key_takes_its_place(worker: FakeWorker, make_service: MakeService) -> None:
    service = await make_service(worker, admin_token="a")
    for headers, status in ((OPERATOR, 401), ({"Authorization": "Bearer a"}, 200)):
        await service.ask("POST", "/admin/undrain", status, headers=headers)


async def status_of(url: str, key: str, call: str = "undrain") -> int:
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/admin/{call}", headers=headers) as response,
    ):
        return response.status


@pytest.mark.slow
async def test_a_process_keeps_its_key_while_it_listens_and_needs_one(
    environment: dict[str, str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    process = await start_process(environment | {"TIDEGATE_HOME": str(home)}, tmp_path)
    try:
        listening = await log_until(process, "listening")
        url = f"http://127.0.0.1:{listening['port']}"
        found = await asyncio.to_thread(access, url, home)
        assert await status_of(url, found.key) == 200
        assert await status_of(url, "") == 401
        # The command tidegate would go on sending one that is there, whatever token it is given.
        config = tmp_path / "tidegate.toml"
        await asyncio.to_thread(config.write_text, 'token = "t"\nadmin_token = "a"')
        assert await status_of(url, found.key, "reload") == 200
        assert (await asyncio.to_thread(access, url, home)).key == ""
        await asyncio.to_thread(config.write_text, 'token = "t"')
        assert await status_of(url, "a", "reload") == 200
        found = await asyncio.to_thread(access, url, home)
        assert await status_of(url, found.key) == 200
        assert await status_of(url, "t") == 403
    finally:
        process.send_signal(signal.SIGTERM)
        await process.communicate()
    assert process.returncode == 0
    assert await asyncio.to_thread(os.listdir, home / "operator") == []


@pytest.mark.slow
async def test_where_none_can_be_kept_nobody_operates(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    process = await start_process(environment | {"TIDEGATE_HOME": str(tmp_path / "file")}, tmp_path)
    try:
        warned = await log_until(
            process,
            "cannot write the operators' key, so nobody can operate this service: make the folder "
            "writable for only this user (TIDEGATE_HOME), or set TIDEGATE_ADMIN_TOKEN",
        )
        assert warned["level"] == "warning"
        listening = await log_until(process, "listening")
        assert await status_of(f"http://127.0.0.1:{listening['port']}", "") == 403
    finally:
        process.send_signal(signal.SIGTERM)
        await process.communicate()
