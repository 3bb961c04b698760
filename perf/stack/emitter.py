"""Path from a token to a socket without Triton, lane or scheduling: ours, and a simple one.

    python -m perf.stack.emitter PORT [plain]

It serves ``POST /v1/completions`` with the orchestrator's ``ChunkStream`` and ``EventStream``.
Tokens cost nothing and arrive one at a time, so that every event is a separate write, unlike on a
busy lane. One loop gives a token to every stream in turn, as a lane's reader does.

``plain`` sends the same events in the simple way: one ``json.dumps`` of the chunk and one
``await response.write`` per token. It is the baseline for the orchestrator's figures. A real relay
of this kind is slower, because its tokens cost something.
"""

import asyncio
import json
import math
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Final, cast

from aiohttp import web

from orchestrator.api.http.event_stream import EventStream
from orchestrator.api.openai.choices import Choices
from orchestrator.api.openai.chunks import ChunkStream
from orchestrator.api.openai.shapes import COMPLETION
from orchestrator.api.openai.types import AnswerOptions, ParsedCompletion
from orchestrator.prompts.encoder import PromptEncoder
from orchestrator.service import Orchestrator
from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.job import Api, Job
from orchestrator.tasks.task import Task
from perf.stack.constants import set_constants
from protocol import Delta, FinishReason, Outcome, Sampling

_TOKEN_ID, _TOKEN_TEXT = 5, " tide"
_PATIENCE: Final = {
    "orchestrator.api.http.event_stream.CLIENT_BUFFER_BYTES": 64 * 2**20,
    "orchestrator.api.http.event_stream.CLIENT_TIMEOUT_S": 30.0,
}


class TokenSource:
    """Source that gives every running task a token in turn, until it has all that it asked for."""

    def __init__(self) -> None:
        self._tasks: set[Task] = set()
        self._filled = asyncio.Event()

    def add(self, task: Task) -> None:
        self._tasks.add(task)
        self._filled.set()

    def remove(self, task: Task) -> None:
        self._tasks.discard(task)

    async def produce(self) -> None:
        while True:
            if not self._tasks:
                self._filled.clear()
                await self._filled.wait()
            now = time.monotonic()
            for task in list(self._tasks):
                task.deliver(Delta(0, [_TOKEN_ID], [_TOKEN_TEXT]), now)
                if task.completion_tokens == task.sampling.max_tokens:
                    self._tasks.discard(task)
                    task.end(Ending(Outcome.MET, FinishReason.LENGTH), now)
            await asyncio.sleep(0)


_TOKEN_SOURCE: web.AppKey[TokenSource] = web.AppKey("token_source", TokenSource)


async def _completions(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    job = Job(
        api=Api.COMPLETIONS,
        model=str(body["model"]),
        sampling=Sampling(max_tokens=int(body["max_tokens"])),
        max_tokens=None,
        deadline=Deadline(at=math.inf, unix_ms=0),
        correlation_id="",
        arrived=time.monotonic(),
    )
    task = Task(uuid.uuid4().hex, job)
    stream = EventStream(request, {}, keepalive_s=0.0)
    parsed = ParsedCompletion(
        job=job, prompts=("",), n=1, is_streamed=True, options=AnswerOptions(usage=True)
    )
    nobody = cast(Orchestrator, None)  # nothing is submitted, cancelled or left here
    choices = Choices(nobody, parsed)
    choices.tasks.append(task)
    chunks = ChunkStream(
        stream, COMPLETION, choices, 0, created=int(time.time()), encoder_of=_no_encoder
    )
    task.listen(chunks)
    source = request.app[_TOKEN_SOURCE]
    source.add(task)
    try:
        return await stream.run()
    finally:
        source.remove(task)


def _no_encoder() -> PromptEncoder:
    raise NotImplementedError("no log-probabilities are asked for here")


async def _plain_completions(request: web.Request) -> web.StreamResponse:
    """Write per token one ``json.dumps`` of its chunk."""
    body = await request.json()
    max_tokens = int(body["max_tokens"])
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    chunk: dict[str, object] = {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "text_completion",
        "created": int(time.time()),
        "model": str(body["model"]),
    }
    for _ in range(max_tokens):
        choice = {"index": 0, "text": _TOKEN_TEXT, "logprobs": None, "finish_reason": None}
        event = {**chunk, "choices": [choice]}
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}
    usage = {"prompt_tokens": 1, "completion_tokens": max_tokens, "total_tokens": max_tokens + 1}
    for last in ({**chunk, "choices": [choice]}, {**chunk, "choices": [], "usage": usage}):
        await response.write(b"data: " + json.dumps(last).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _live(_: web.Request) -> web.Response:
    return web.Response(text="ok")


async def _producing(app: web.Application) -> AsyncIterator[None]:
    producing = asyncio.create_task(app[_TOKEN_SOURCE].produce())
    yield
    producing.cancel()
    with suppress(asyncio.CancelledError):
        await producing


def main() -> None:
    app = web.Application()
    if sys.argv[2:] == ["plain"]:
        app.router.add_post("/v1/completions", _plain_completions)
    else:
        set_constants(_PATIENCE)
        app[_TOKEN_SOURCE] = TokenSource()
        app.cleanup_ctx.append(_producing)
        app.router.add_post("/v1/completions", _completions)
    app.router.add_get("/health/live", _live)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)


if __name__ == "__main__":
    main()
