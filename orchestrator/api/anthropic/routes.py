"""``/v1/messages``: Anthropic's Messages API; the official SDK works unmodified."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from aiohttp import web

from orchestrator.api.anthropic.events import MessageEvents
from orchestrator.api.anthropic.shapes import message
from orchestrator.api.anthropic.types import (
    CountTokensRequest,
    MessagesRequest,
    chat_of,
    refuse_unsupported,
)
from orchestrator.api.http.body import read_body
from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR
from orchestrator.api.http.deadlines import read_deadline
from orchestrator.api.http.fields import read_job
from orchestrator.api.http.one_answer import stream_answer, whole_answer
from orchestrator.api.http.responses import json_response, task_fields, task_headers
from orchestrator.errors import InvalidRequest
from orchestrator.tasks.job import Api, Job, OnDisconnect, Prompt

_message_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountTokensRequest)
_VERSION = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)


class ParsedRequest(NamedTuple):
    """A request, without its body."""

    job: Job
    prompt: Prompt
    is_streamed: bool


async def messages(request: web.Request) -> web.StreamResponse:
    """The next message of a conversation, or the rest of one that the client began."""
    check_version(request.headers)
    parsed = await read_body(request, _message_decoder, lambda body: _parse(request, body))
    if parsed.is_streamed:
        name = request[CONTEXT].answer_id
        return await stream_answer(
            request, parsed.job, parsed.prompt, lambda stream: MessageEvents(stream, name)
        )
    task, answer = await whole_answer(request, parsed.job, parsed.prompt)
    assert task.ending is not None
    text = answer.text() + task.ending.tail
    content: list[object] = [{"type": "text", "text": text}] if text else []
    body = message(task, task.ending, content) | task_fields(task)
    now = request.app[ORCHESTRATOR].clock.now()
    return json_response(body, headers=task_headers(task, now))


async def count_tokens(request: web.Request) -> web.Response:
    """How many tokens a conversation has as a prompt."""
    check_version(request.headers)
    orchestrator, context = request.app[ORCHESTRATOR], request[CONTEXT]
    deadline = read_deadline(
        request.headers, None, context.arrival, orchestrator.deadlines, in_one_piece=True
    )
    context.deadline = deadline

    def parse(body: CountTokensRequest) -> tuple[str, Prompt]:
        context.field_names = {"prompt": "messages"}
        refuse_unsupported(body)
        return body.model, chat_of(body.system, body.messages)

    model, prompt = await read_body(request, _count_decoder, parse)
    ids = await orchestrator.tokenize(model, prompt, deadline, context.key.fingerprint)
    return json_response({"input_tokens": len(ids)})


def check_version(headers: Mapping[str, str]) -> None:
    """Every version means the same here. Raises ``InvalidRequest`` for what is none."""
    version = headers.get("anthropic-version")
    if version is not None and not _VERSION.fullmatch(version.strip()):
        raise InvalidRequest(
            f"anthropic-version must be a date such as 2023-06-01, got {version[:64]!r}",
            field="anthropic-version",
        )


def routes() -> list[web.RouteDef]:
    return [
        web.post("/v1/messages", messages),
        web.post("/v1/messages/count_tokens", count_tokens),
    ]


def _parse(request: web.Request, body: MessagesRequest) -> ParsedRequest:
    refuse_unsupported(body)
    keep = body.on_disconnect is OnDisconnect.CONTINUE
    job, prompt = read_job(request, body, Api.MESSAGES, keep=keep)
    return ParsedRequest(job, prompt, bool(body.stream))
