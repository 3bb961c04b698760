"""The client for plain code, in a thread next to a real orchestrator's loop."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

import tidegate
from tests.orchestrator.conftest import Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker, Plan
from tidegate import SyncClient, deadline

_T = TypeVar("_T")


async def plainly(work: Callable[[SyncClient], _T], url: str, token: str | None = None) -> _T:
    """Run plain code with a client, as its author would."""

    def run() -> _T:
        with SyncClient(url, token=token) as client:
            return work(client)

    return await asyncio.to_thread(run)


async def test_calls_and_streams(service: Service) -> None:
    def work(client: SyncClient) -> None:
        assert client.models() == ["fake"]
        answer = client.generate("hi", max_tokens=3)
        assert answer.text == "w0 w1 w2 "
        events = list(client.stream("hi", max_tokens=3))
        assert [type(event) for event in events] == [
            tidegate.Queued,
            tidegate.Started,
            *[tidegate.Token] * 3,
            tidegate.End,
        ]
        task = client.submit("hi", max_tokens=2, idempotency_key="mine")
        assert client.submit("hi", max_tokens=2, idempotency_key="mine").task_id == task.task_id
        assert isinstance(list(client.events(task.task_id))[-1], tidegate.End)
        assert client.status(task.task_id).outcome == "met"
        client.cancel(task.task_id)
        with pytest.raises(LookupError):
            client.status("none")

    await plainly(work, service.url)


@pytest.mark.parametrize("way", ["break", "with", "close", "client"])
async def test_leaving_a_stream_frees_the_worker(
    service: Service, worker: FakeWorker, way: str
) -> None:
    """WP-2: by every way out of a loop."""
    worker.plan = lambda submit: Plan(stall_at=1)

    def until_token(events: tidegate.SyncStream) -> None:
        for event in events:
            if isinstance(event, tidegate.Token):
                break

    def work(client: SyncClient) -> None:
        if way == "break":
            until_token(client.stream("hi"))
        elif way == "with":
            with client.stream("hi") as events:
                until_token(events)
        else:
            events = client.stream("hi")
            until_token(events)
            events.close() if way == "close" else client.close()

    await plainly(work, service.url)
    await worker.until(lambda: len(worker.cancels) == 1)


async def test_a_block_holds_in_plain_code_and_in_its_threads(
    service: Service, worker: FakeWorker
) -> None:
    def work(client: SyncClient) -> None:
        with deadline(50):
            client.generate("hi", max_tokens=1)
        with deadline(-1), pytest.raises(tidegate.DeadlineExceeded, match="nothing was sent"):
            client.generate("hi")
        client.generate("hi", max_tokens=1)

    await plainly(work, service.url)
    assert [submit.budget_ms <= 50_000 for submit in worker.submits] == [True, False]


async def test_a_closed_client_says_so(service: Service) -> None:
    def work(client: SyncClient) -> None:
        client.close()
        client.close()
        with pytest.raises(RuntimeError, match="closed"):
            client.models()

    await plainly(work, service.url)


@pytest.mark.parametrize("end", ["ctrl-c", "exit"])
async def test_a_program_that_ends_leaves_no_work_behind(
    service: Service, worker: FakeWorker, end: str
) -> None:
    """WP-2: Ctrl-C while a token is waited for; an end with a stream half read."""
    worker.plan = lambda submit: Plan(stall_at=1)
    program = f"""if True:
        from tidegate import SyncClient, Token
        client = SyncClient({service.url!r})
        events = client.stream("hi")
        for event in events:
            if isinstance(event, Token):
                print("token", flush=True)
                if {end == "exit"}:
                    break
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"token\n"
    if end == "ctrl-c":
        process.send_signal(signal.SIGINT)
    _, said = await process.communicate()
    await worker.until(lambda: len(worker.cancels) == 1)
    if end == "exit":
        assert (process.returncode, said) == (0, b"")
    else:
        assert said.decode().rstrip().endswith("KeyboardInterrupt")


async def test_ctrl_c_right_after_the_work_was_handed_over_stops_it(
    service: Service, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes when the loop has the work and its future has no name yet: the next event
    was waited for without end, and so was the close."""
    worker.plan = lambda submit: Plan(stall_at=1)
    submit = asyncio.run_coroutine_threadsafe

    def interrupted(*work: Any) -> Any:
        monkeypatch.undo()
        submit(*work)
        raise KeyboardInterrupt

    def run(client: SyncClient) -> None:
        events = client.stream("hi")
        assert next(event for event in events if isinstance(event, tidegate.Token))
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(events)

    await plainly(run, service.url)
    await worker.until(lambda: len(worker.cancels) == 1)


@for_each("patience", ["soon", None, -1, float("nan")])
def test_a_patience_that_is_none_is_said_so_and_leaves_no_thread(patience: Any) -> None:
    with pytest.raises(ValueError, match=r"reconnect_for must be .*, got"):
        SyncClient(reconnect_for=patience)
    assert not [thread for thread in threading.enumerate() if thread.name == "tidegate-client"]
