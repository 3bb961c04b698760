"""Settings and keys are read again without dropping a stream (SIGHUP, POST /admin/reload)."""

import asyncio
import os
import signal
from typing import Any

import pytest

from orchestrator.__main__ import handle_signals
from orchestrator.settings import load_settings
from orchestrator.settings.sections import INTERRUPT_GRACE_S, QueueSettings
from tests.orchestrator.conftest import OPERATOR, MakeService, MakeWorker, Service, bearer
from tests.orchestrator.dispatch.test_moving import begin_text
from tests.orchestrator.dispatch.test_retry import EXPECTED, TASK, text_of
from tests.support.fake_worker import FakeWorker


async def reload(service: Service, headers: dict[str, str] = OPERATOR, **changes: Any) -> Any:
    """What the answer says of it; the sources say ``changes`` now."""
    before = service.parts.reloader.settings.model_dump(exclude_unset=True)
    service.parts.reloader.load = lambda: load_settings(**(before | changes))
    return await service.answer("POST", "/admin/reload", headers=headers)


async def test_or14_limits_change_under_a_stream(worker: FakeWorker, service: Service) -> None:
    running = await begin_text(service, worker)
    held = worker.plan(worker.submits[0])
    assert await reload(service) == (200, {"changed": [], "needs_restart": []})
    status, told = await reload(
        service, limits__each_key__concurrent=1, admission__default_max_tokens=7, port=1
    )
    assert status == 200
    assert told == {
        "changed": ["admission.default_max_tokens", "limits.each_key.concurrent"],
        "needs_restart": ["port"],
    }
    await service.ask("POST", "/v2/tasks", 429, json=TASK)
    _, told = await reload(service, limits__each_key__concurrent=0)
    assert told["needs_restart"] == []
    await service.ask("POST", "/v2/tasks", 202, json={"prompt": "hello"})
    await worker.until(lambda: len(worker.submits) == 2)
    assert worker.submits[1].sampling.max_tokens == 7
    held.release.set()
    assert text_of(await running) == EXPECTED


async def test_or14_a_bad_file_keeps_the_old_settings_and_says_why(service: Service) -> None:
    status, told = await reload(service, queue__max_waiting=-7)
    assert status == 400
    message = told["error"]["message"]
    assert "QUEUE__MAX_WAITING" in message and "old ones stay" in message
    assert service.orchestrator.queue.bound == 100


async def test_or12_keys_come_and_go(worker: FakeWorker, make_service: MakeService) -> None:
    service = await make_service(worker, token="old", admin_token="operator")
    operator = {"Authorization": "Bearer operator"}

    async def status_with(token: str) -> int:
        return (await service.answer("GET", "/v2/tasks", headers=bearer(token)))[0]

    assert [await status_with("old"), await status_with("new")] == [200, 401]
    assert (await reload(service, {"Authorization": "Bearer old"}))[0] == 403
    status, told = await reload(service, operator, token="new")
    assert (status, told["changed"]) == (200, ["token"])
    assert "new" not in str(told).replace("needs", "")
    assert [await status_with("old"), await status_with("new")] == [401, 200]
    # Nobody lets everybody in by a line that was lost.
    service.parts.reloader.load = lambda: service.parts.settings.model_copy(
        update={"token": None, "admin_token": None}
    )
    assert (await service.ask("POST", "/admin/reload", headers=operator))["changed"] == []
    assert await status_with("anything") == 401


async def test_or24_prefixes_are_isolated_from_the_second_key_on(
    worker: FakeWorker, make_service: MakeService
) -> None:
    operator = {"Authorization": "Bearer operator"}
    service = await make_service(worker, admin_token="operator")
    for salt, keys in (("", {}), ("admin", {"other": {"token": "other"}})):
        assert (await reload(service, operator, keys=keys))[0] == 200
        await service.ask("POST", "/v2/tasks", 202, json=TASK, headers=operator)
        await worker.until(lambda: bool(worker.submits))
        assert worker.submits.pop().cache_salt == salt


async def test_or6_instances_that_are_listed_again_come_and_go(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    first, second = await make_worker(), await make_worker()
    service = await make_service(first)
    running = await begin_text(service, first)
    held = first.plan(first.submits[0])
    _, told = await reload(service, instances=(second.address,))
    assert told["changed"] == ["instances"]
    await service.until(lambda: service.orchestrator.registry.instances[second.address].ready)
    assert not service.orchestrator.registry.instances[first.address].ready
    held.release.set()
    assert text_of(await asyncio.wait_for(running, 20)) == EXPECTED  # where it was
    _, told = await reload(service, instances=("dns:elsewhere:1", second.address))
    assert told == {"changed": [], "needs_restart": ["instances"]}


async def test_or14_sighup_reloads_or_ends_with_its_terminal(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, reloader = asyncio.get_running_loop(), service.parts.reloader
    has_terminal = True
    monkeypatch.setattr(os, "isatty", lambda descriptor: has_terminal)
    stops = handle_signals(loop, reloader, had_terminal=True)
    try:
        changed = service.parts.settings.model_copy(update={"queue": QueueSettings(max_waiting=7)})
        reloader.load = lambda: changed
        os.kill(os.getpid(), signal.SIGHUP)
        await service.until(lambda: service.orchestrator.queue.bound == 7)
        assert stops.empty()
        has_terminal = False
        os.kill(os.getpid(), signal.SIGHUP)
        assert await stops.get() == INTERRUPT_GRACE_S
    finally:
        for one in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(one)
