"""Requests that are one task with one answer: streamed as events, or in one piece."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from aiohttp import web

from orchestrator.api.config import CONFIG
from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR
from orchestrator.api.http.event_stream import EventStream
from orchestrator.api.http.responses import deadline_headers
from orchestrator.tasks.job import Job, Prompt
from orchestrator.tasks.task import Listener, Task
from orchestrator.tasks.transcript import Transcript


async def stream_answer(
    request: web.Request, job: Job, prompt: Prompt, listen: Callable[[EventStream], Listener]
) -> web.StreamResponse:
    """Submit a job; ``listen`` makes the listener that writes its answer to a stream."""
    orchestrator = request.app[ORCHESTRATOR]
    stream = EventStream(request, {}, request.app[CONFIG].keepalive_s)
    listener = listen(stream)
    request[CONTEXT].task = task = await orchestrator.submit(job, prompt, [listener])
    stream.headers |= deadline_headers(task.deadline)
    stream.on_behind = lambda: orchestrator.mark_reading(task, not stream.is_behind)
    try:
        return await stream.run()
    finally:
        task.unlisten(listener)
        orchestrator.disconnected(task, too_slow=stream.too_slow)


class Awaited(Listener, Protocol):
    """A listener that can be waited for."""

    complete: asyncio.Event


async def until_answered(request: web.Request, job: Job, prompt: Prompt, answer: Awaited) -> Task:
    """Submit a job and wait for its end, which ``answer`` hears.

    Raises ``TidegateError`` when it did not end well.
    """
    orchestrator = request.app[ORCHESTRATOR]
    request[CONTEXT].task = task = await orchestrator.submit(job, prompt, [answer])
    try:
        await answer.complete.wait()
    finally:
        task.unlisten(answer)
        orchestrator.disconnected(task)
    assert task.ending is not None
    if task.ending.error is not None:
        raise task.ending.error
    return task


class WholeAnswer(Transcript):
    """A transcript that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.complete = asyncio.Event()

    def ended(self, task: Task) -> None:  # type: ignore[override]  # it hears tasks only
        self.complete.set()


async def whole_answer(
    request: web.Request, job: Job, prompt: Prompt, answer: WholeAnswer | None = None
) -> tuple[Task, Transcript]:
    """Submit a job and wait for all its tokens and texts; the ``tail`` of the text is the ending's.
    Raises ``TidegateError`` if it did not end well."""
    answer = answer or WholeAnswer()
    return await until_answered(request, job, prompt, answer), answer
