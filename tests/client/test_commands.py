"""Every command that asks a service, before a real orchestrator in front of a fake worker."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from catalog.atomic import write_atomically
from catalog.operator_key import key_file
from orchestrator.settings.sections import QueueSettings
from tests.orchestrator.conftest import OPERATORS_KEY, MakeService, Service
from tests.support.fake_worker import FakeWorker, Plan
from tidegate import Client
from tidegate.cli.main import main

Ask = Callable[..., Any]


@pytest.fixture
def ask(
    service: Service,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Ask:
    """Run a command next to the service; its exit status, stdout and stderr."""
    keep_operators_key(service, tmp_path)
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path))
    monkeypatch.setenv("TIDEGATE_URL", service.url)
    monkeypatch.delenv("TIDEGATE_TOKEN", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)  # it would cut lines

    async def run(*argv: str) -> tuple[int, str, str]:
        status = await asyncio.to_thread(main, argv)
        return status, *capsys.readouterr()

    return run


def keep_operators_key(service: Service, home: Path) -> None:
    """Where a service of its own process keeps it."""
    at = urlsplit(service.url)
    path = key_file(home, at.hostname or "", at.port or 0)
    path.parent.mkdir(mode=0o700)
    write_atomically(path, OPERATORS_KEY.encode())


async def ask_json(ask: Ask, *argv: str) -> Any:
    status, out, err = await ask(*argv, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


async def test_models(ask: Ask, worker: FakeWorker) -> None:
    status, out, err = await ask("models")
    assert (status, err) == (0, "")
    header, line = out.splitlines()
    assert header.split()[:3] == ["MODEL", "CONTEXT", "INSTANCES"]
    assert line.split()[:4] == ["fake", "512", "1/1", "cpu"]
    assert await ask_json(ask, "models") == [
        {"model": "fake", "max_model_len": 512, "instances": [worker.address]}
    ]


async def test_tasks_are_listed_shown_and_cancelled(
    ask: Ask, service: Service, worker: FakeWorker
) -> None:
    worker.plan = lambda submit: Plan(stall_at=2) if submit.sampling.max_tokens == 9 else Plan()
    async with Client(service.url) as client:
        await client.generate("a", max_tokens=3)
        stalled = (await client.submit("b", max_tokens=9)).task_id
    listed = await ask_json(ask, "tasks", "list")
    assert [task["task_id"] == stalled for task in listed["tasks"]] == [True, False]
    status, out, _ = await ask("tasks", "list", "--limit", "1")
    assert status == 0
    assert stalled in out and "--limit 2 shows more" in out
    status, out, _ = await ask("tasks", "cancel", stalled)
    assert (status, out) == (0, f"cancelled {stalled}\n")
    await worker.until(lambda: len(worker.cancels) == 1)
    ended = await ask_json(ask, "tasks", "list", "--status", "ended")
    assert [task["outcome"] for task in ended["tasks"]] == ["aborted", "met"]
    status, out, _ = await ask("tasks", "show", ended["tasks"][1]["task_id"])
    assert status == 0
    assert "met · length" in out and "w0 w1 w2" in out and "1 read, 3 made" in out
    assert (await ask_json(ask, "tasks", "show", stalled))["outcome"] == "aborted"
    again = await ask_json(ask, "tasks", "cancel", stalled)
    assert again == {"cancelled": [], "had_ended": [stalled]}


async def test_what_does_not_work_is_said_in_one_line(ask: Ask) -> None:
    status, out, err = await ask("tasks", "show", "none")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("tidegate tasks show: there is no task 'none'")
    assert "`tidegate tasks list`" in err


@pytest.mark.parametrize(
    "argv",
    [["models"], ["tasks", "list"], ["chat", "hi"]],
)
def test_nobody_there(argv: list[str], unused_tcp_port: int, capsys: Any) -> None:
    assert main([*argv, "--url", f"http://127.0.0.1:{unused_tcp_port}"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "Connection refused; start a service with `tidegate up`" in err


@pytest.mark.parametrize("url", ["foo", "localhost:8080", "http://", "http://127.0.0.1:99999"])
def test_an_address_that_is_none(url: str, capsys: Any) -> None:
    for command in (["models"], ["chat", "hi"]):
        assert main([*command, "--url", url]) == 1
        assert (
            "is not an address of a service: expected http://HOST:PORT" in capsys.readouterr().err
        )


async def test_a_service_without_tls_is_told_apart(service: Service, capsys: Any) -> None:
    argv = ["models", "--url", service.url.replace("http:", "https:")]
    assert await asyncio.to_thread(main, argv) == 1
    assert "the TLS handshake failed; does it speak plain http?" in capsys.readouterr().err


async def test_a_token_is_asked_for(
    worker: FakeWorker, make_service: MakeService, capsys: Any
) -> None:
    service = await make_service(worker, token="secret")
    argv = ["models", "--url", service.url]
    assert await asyncio.to_thread(main, argv) == 1
    assert "give its token with --token or TIDEGATE_TOKEN" in capsys.readouterr().err
    assert await asyncio.to_thread(main, [*argv, "--token", "secret"]) == 0


async def test_or14_an_orchestrator_is_drained_and_taken_back(
    ask: Ask, service: Service, worker: FakeWorker
) -> None:
    held = worker.does(Plan(stall_at=1))
    async with Client(service.url) as client:
        task = await client.submit("a", max_tokens=3)
        draining = asyncio.create_task(ask("drain", "--grace", "20"))
        await service.until(lambda: service.parts.health.status == "draining")
        held.release.set()
        status, out, err = await draining
        assert (status, out, err) == (0, f"drained {service.url}\n", "")
        assert (await client.status(task.task_id)).outcome == "met"
        status, out, _ = await ask("drain", "--undo")
        assert (status, out) == (0, f"{service.url} accepts new work\n")
        await client.generate("b", max_tokens=3)


async def test_or14_an_instance_is_drained_and_taken_back(
    ask: Ask, service: Service, worker: FakeWorker
) -> None:
    address = worker.address
    assert await ask("drain", "--instance", address) == (0, f"drained {address}\n", "")
    assert not service.orchestrator.registry.instances[address].ready
    told = await ask_json(ask, "drain", "--instance", address, "--undo")
    assert (told["address"], told["draining"]) == (address, False)
    status, _, err = await ask("drain", "--instance", "elsewhere:1")
    assert status == 1 and address in err
    status, out, _ = await ask("drain", "--instance", address, "--no-wait")
    assert (status, out) == (0, f"draining {address}: 0 still run\n")


async def test_wk7_an_instance_is_given_another_model_and_back(
    ask: Ask, service: Service, worker: FakeWorker
) -> None:
    worker.can_load("other")
    address = worker.address
    status, out, err = await ask("swap", address, "other")
    assert (status, err) == (0, "") and out.startswith(f"{address} serves other after ")
    assert await ask("swap", address, "other") == (0, f"{address} serves other already\n", "")
    told = await ask_json(ask, "swap", address, "fake")
    assert (told["model"], told["phase"]) == ("fake", "done")
    status, _, err = await ask("swap", address, "unheard")
    assert status == 1 and "unheard" in err
    for words in ((address,), (address, "x", "--set", "kv.blocks")):
        with pytest.raises(SystemExit):
            await ask("swap", *words)


async def test_or25_without_the_operators_key_a_command_says_where_it_is(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another user of the machine."""
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path / "another"))
    status, out, err = await ask("reload")
    assert (status, out) == (1, "")
    assert "the operators' key" in err and "TIDEGATE_HOME/operator" in err


async def test_or14_settings_are_read_again(ask: Ask, service: Service) -> None:
    assert await ask("reload") == (0, "changed: nothing\n", "")
    changed = service.parts.settings.model_copy(
        update={"queue": QueueSettings(max_waiting=7), "port": 1}
    )
    service.parts.reloader.load = lambda: changed
    status, out, _ = await ask("reload")
    assert (status, out) == (0, "changed: queue.max_waiting\nneeds a restart: port\n")
    assert service.orchestrator.queue.bound == 7
