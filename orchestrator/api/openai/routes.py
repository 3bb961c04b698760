"""``/v1``: OpenAI's chat completions, completions and models; the official SDK works unmodified."""

import asyncio
from typing import NamedTuple

import msgspec
from aiohttp import web

from orchestrator.api.config import CONFIG
from orchestrator.api.http.body import read_body
from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR
from orchestrator.api.http.event_stream import EventStream
from orchestrator.api.http.fields import read_job
from orchestrator.api.http.responses import (
    deadline_headers,
    json_response,
    task_fields,
    task_headers,
)
from orchestrator.api.openai.chunks import ChunkStream
from orchestrator.api.openai.shapes import CHAT, COMPLETION, Shape, usage
from orchestrator.api.openai.types import ChatRequest, CompletionRequest, OpenAiRequest
from orchestrator.service import Orchestrator
from orchestrator.tasks.job import Api, Job, OnDisconnect, Prompt
from orchestrator.tasks.transcript import Transcript

_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)


class ParsedRequest(NamedTuple):
    """A request, without its body."""

    job: Job
    prompt: Prompt
    is_streamed: bool
    with_usage: bool


async def chat(request: web.Request) -> web.StreamResponse:
    """One answer to a chat."""
    parsed = await read_body(request, _chat_decoder, lambda body: _parse(request, body, Api.CHAT))
    return await _complete(request, parsed, CHAT)


async def completion(request: web.Request) -> web.StreamResponse:
    """The continuation of a text."""
    parsed = await read_body(
        request, _completion_decoder, lambda body: _parse(request, body, Api.COMPLETIONS)
    )
    return await _complete(request, parsed, COMPLETION)


async def models(request: web.Request) -> web.Response:
    """Every model that is served."""
    orchestrator = request.app[ORCHESTRATOR]
    data = [_model(orchestrator, name) for name in sorted(orchestrator.models.by_name())]
    return json_response({"object": "list", "data": data})


async def model(request: web.Request) -> web.Response:
    """One model by name."""
    orchestrator = request.app[ORCHESTRATOR]
    name = request.match_info["model"]
    orchestrator.model(name)
    return json_response(_model(orchestrator, name))


def routes() -> list[web.RouteDef]:
    return [
        web.post("/v1/chat/completions", chat),
        web.post("/v1/completions", completion),
        web.get("/v1/models", models),
        web.get("/v1/models/{model:.+}", model),
    ]


def _parse(request: web.Request, body: OpenAiRequest, api: Api) -> ParsedRequest:
    body.refuse_unsupported()
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    keep = body.on_disconnect is OnDisconnect.CONTINUE
    job, prompt = read_job(request, body, api, keep=keep)
    return ParsedRequest(job, prompt, bool(body.stream), with_usage)


async def _complete(
    request: web.Request, parsed: ParsedRequest, shape: Shape
) -> web.StreamResponse:
    orchestrator = request.app[ORCHESTRATOR]
    created = int(request[CONTEXT].arrival.unix)
    if parsed.is_streamed:
        return await _stream(request, orchestrator, parsed, shape, created)
    return await _answer(request, orchestrator, parsed, shape, created)


async def _stream(
    request: web.Request,
    orchestrator: Orchestrator,
    parsed: ParsedRequest,
    shape: Shape,
    created: int,
) -> web.StreamResponse:
    job = parsed.job
    stream = EventStream(request, deadline_headers(job.deadline), request.app[CONFIG].streams)
    chunks = ChunkStream(
        stream,
        shape,
        created=created,
        token_of=lambda token_id: orchestrator.model(job.model).token(token_id),
        with_usage=parsed.with_usage,
    )
    request[CONTEXT].task = task = await orchestrator.submit(job, parsed.prompt, [chunks])
    stream.on_behind = lambda: orchestrator.mark_reading(task, not stream.is_behind)
    try:
        return await stream.run()
    finally:
        task.unlisten(chunks)
        orchestrator.disconnected(task, too_slow=stream.too_slow)


async def _answer(
    request: web.Request,
    orchestrator: Orchestrator,
    parsed: ParsedRequest,
    shape: Shape,
    created: int,
) -> web.Response:
    answer = _Answer()
    task = await orchestrator.submit(parsed.job, parsed.prompt, [answer])
    request[CONTEXT].task = task
    try:
        await answer.complete.wait()
    finally:
        orchestrator.disconnected(task)
    ending = task.ending
    assert ending is not None
    if ending.error is not None:
        raise ending.error
    logprobs = None
    if answer.logprobs:
        token_of = orchestrator.model(task.model).token
        logprobs = shape.logprobs(answer.ids, answer.texts, answer.logprobs, token_of)
    text = answer.text() + ending.tail
    body = shape.head(task, created, chunk=False) | {
        "choices": [shape.choice(text, logprobs, ending.finish_reason.value)],
        "usage": usage(task),
        **task_fields(task),
    }
    return json_response(body, headers=task_headers(task, orchestrator.clock.now()))


class _Answer(Transcript):
    """A transcript that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.complete = asyncio.Event()

    def ended(self, task: object) -> None:
        self.complete.set()


def _model(orchestrator: Orchestrator, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": orchestrator.started_unix,
        "owned_by": "tidegate",
    }
