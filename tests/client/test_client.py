"""The client against an orchestrator that drops connections, refuses and hangs on cue."""

import asyncio
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import pytest

import tidegate
from tests.support.fake_orchestrator import CUT, FORGOTTEN, HANG, FakeOrchestrator, end, sse, token
from tidegate import Client

STARTED = sse(1, "started", {})


async def collect(client: Client, **options: object) -> list[tidegate.Event]:
    return [event async for event in client.stream("hi", **options)]  # type: ignore[arg-type]


async def test_options_travel_and_the_deadline_becomes_milliseconds() -> None:
    """DL-1: ``deadline_ms`` in the body."""
    async with (
        FakeOrchestrator(*[[end(1, 0)]] * 4).serve() as fake,
        Client(fake.base_url) as client,
    ):
        await client.generate("hi", max_tokens=5, seed=7, deadline=timedelta(seconds=2))
        await client.generate([{"role": "user", "content": "hi"}], deadline=1500)
        await client.generate([1, 2, 3])
        await client.generate("hi", first_token=timedelta(seconds=0.5), token_gap=0.25)
    assert fake.submitted == [
        {"prompt": "hi", "max_tokens": 5, "seed": 7, "deadline_ms": 2000},
        {"messages": [{"role": "user", "content": "hi"}], "deadline_ms": 1500},
        {"prompt_token_ids": [1, 2, 3]},
        {"prompt": "hi", "first_token_ms": 500, "token_gap_ms": 0.25},
    ]


async def test_a_dropped_connection_is_resumed_without_loss_or_repeat() -> None:
    """OR-2: ``Last-Event-ID``. The third event is cut in the middle and must come again."""
    third = token(3, "c")
    fake = FakeOrchestrator(
        [STARTED, token(2, "b"), third[: len(third) // 2], CUT],
        [third, token(4, "d")],  # ends without a terminal event
        [end(5, 3)],
    )
    async with fake.serve(), Client(fake.base_url) as client:
        answer = await client.generate("hi", deadline=timedelta(seconds=30))
    assert answer.text == "bcd"
    assert fake.last_event_ids == [None, "2", "4"]
    assert fake.cancelled == []


async def test_a_server_that_is_busy_while_resuming_is_asked_again() -> None:
    fake = FakeOrchestrator([STARTED, CUT], ["refuse"], [end(2, 0)])
    fake.refusal = (503, {"error": {"code": "not_ready", "message": "starting"}}, {})
    async with fake.serve(), Client(fake.base_url) as client:
        events = [event async for event in client.events("t1")]
    assert isinstance(events[-1], tidegate.End)


async def test_a_stream_that_stays_broken_is_lost_at_the_deadline() -> None:
    fake = FakeOrchestrator(*[[CUT] for _ in range(200)])
    async with fake.serve(), Client(fake.base_url) as client:
        with pytest.raises(tidegate.StreamLost, match="t1: a broken answer from") as lost:
            await collect(client, deadline=timedelta(milliseconds=-900))
    assert lost.value.task_id == "t1"
    assert fake.cancelled == ["t1"]


@pytest.mark.parametrize("before", [[], [[STARTED, token(2, "a"), CUT]]])
async def test_a_stream_whose_task_was_forgotten_is_lost(
    before: list[list[bytes | str | None]],
) -> None:
    """The service was killed and started again, before its first event was asked for or later."""
    fake = FakeOrchestrator(*before, [FORGOTTEN])
    async with fake.serve(), Client(fake.base_url) as client:
        with pytest.raises(
            tidegate.StreamLost, match="task t1: the service no longer has it"
        ) as lost:
            await collect(client)
    assert lost.value.task_id == "t1" and isinstance(lost.value.__cause__, tidegate.NotFound)


async def test_a_task_that_never_was_is_not_found() -> None:
    async with FakeOrchestrator([FORGOTTEN]).serve() as fake, Client(fake.base_url) as client:
        with pytest.raises(tidegate.NotFound):
            await anext(aiter(client.events("t1")))


async def test_many_streams_do_not_keep_a_cancel_waiting() -> None:
    """More than an HTTP library's usual limit of connections."""
    many = 110
    fake = FakeOrchestrator(*[[STARTED, HANG] for _ in range(many)])
    async with fake.serve(), Client(fake.base_url) as client, AsyncExitStack() as streams:
        opened = [await streams.enter_async_context(client.stream("hi")) for _ in range(many)]
        await asyncio.gather(*(anext(stream) for stream in opened))
        await opened[0].aclose()
        assert fake.cancelled == ["t1"]
    assert len(fake.cancelled) == many


async def test_cancelling_the_reader_cancels_the_task() -> None:
    """WP-2."""
    fake = FakeOrchestrator([STARTED, token(2, "a"), HANG])
    seen = asyncio.Event()

    async def read(client: Client) -> None:
        async for event in client.stream("hi"):
            if isinstance(event, tidegate.Token):
                seen.set()

    async with fake.serve(), Client(fake.base_url) as client:
        reader = asyncio.create_task(read(client))
        await seen.wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert fake.cancelled == ["t1"]


async def test_cancelling_while_the_task_is_submitted_cancels_it_too() -> None:
    """WP-2: accepted or not, nothing may run for a reader who has left."""
    fake = FakeOrchestrator()
    fake.may_answer.clear()
    async with fake.serve(), Client(fake.base_url) as client:
        reader = asyncio.create_task(collect(client))
        await fake.submission_arrived.wait()
        reader.cancel()
        fake.may_answer.set()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert fake.cancelled == ["t1"]


@pytest.mark.parametrize(
    ("code", "raised", "also"),
    [
        ("deadline_exceeded", tidegate.DeadlineExceeded, TimeoutError),
        ("cancelled", tidegate.TaskCancelled, tidegate.ApiError),
        ("context_overflow", tidegate.InvalidRequest, ValueError),
        ("instance_lost", tidegate.Unavailable, tidegate.ApiError),
        ("engine_error", tidegate.ApiError, tidegate.TidegateError),
    ],
)
async def test_a_terminal_error_event_raises(
    code: str, raised: type[tidegate.ApiError], also: type[Exception]
) -> None:
    """DL-5: after the first byte the failure is the stream's terminal event."""
    failed = sse(3, "error", {"code": code, "message": "why", "retryable": False})
    fake = FakeOrchestrator([STARTED, token(2, "a"), failed])
    async with fake.serve(), Client(fake.base_url) as client:
        with pytest.raises(raised, match="why") as caught:
            await collect(client)
    assert isinstance(caught.value, also)
    assert caught.value.code == code
    assert caught.value.task_id == "t1"
    assert fake.cancelled == []


@pytest.mark.parametrize(
    ("status", "body", "headers", "raised", "code"),
    [
        (401, {"error": {"code": "forbidden"}}, {}, tidegate.AuthFailed, "forbidden"),
        (429, {"code": "draining"}, {"retry-after-ms": "250"}, tidegate.Unavailable, "draining"),
        (503, "<html>proxy</html>", {"Retry-After": "0.25"}, tidegate.Unavailable, "http_503"),
        (500, "oops", {}, tidegate.ApiError, "http_500"),
        (418, "teapot", {}, tidegate.InvalidRequest, "http_418"),
    ],
)
@pytest.mark.usefixtures("fake_time")
async def test_refusals_are_typed(
    status: int, body: Any, headers: dict[str, str], raised: type[tidegate.ApiError], code: str
) -> None:
    fake = FakeOrchestrator()
    fake.refusal = (status, body, headers)
    async with fake.serve(), Client(fake.base_url) as client:
        with pytest.raises(raised) as caught:
            await client.submit("hi")
    assert (caught.value.status, caught.value.code) == (status, code)
    if headers:
        assert caught.value.retryable
        assert caught.value.retry_after_s == 0.25


async def test_garbage_is_a_protocol_error() -> None:
    fake = FakeOrchestrator([sse(1, "token", {"no_text": True})])
    async with fake.serve(), Client(fake.base_url) as client:
        with pytest.raises(tidegate.ProtocolError, match="token"):
            await collect(client)
    assert fake.cancelled == ["t1"]
