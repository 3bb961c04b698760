"""``/v1/messages``: Anthropic's Messages API; the official SDK works unmodified."""

from typing import NamedTuple

from aiohttp import web

from orchestrator.api.anthropic.shapes import MessageEvents, blocks_of, message
from orchestrator.api.anthropic.types import (
    CountTokensRequest,
    MessagesRequest,
    chat_of,
    refuse_unsupported,
)
from orchestrator.api.http.body import read_body
from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR, served_name
from orchestrator.api.http.field_errors import wrong
from orchestrator.api.http.fields import read_headers_deadline, read_job_of
from orchestrator.api.http.finding import cancel
from orchestrator.api.http.outputs import format_of, in_form, output_of
from orchestrator.api.http.responses import (
    json_response,
    stream_answer,
    task_fields,
    task_headers,
    whole_answer,
)
from orchestrator.parsing.parser import ToolUse
from orchestrator.tasks.job import Api, Job, OnDisconnect, Prompt


class ParsedMessages(NamedTuple):
    job: Job
    prompt: Prompt
    tools: ToolUse | None
    is_streamed: bool
    must_think: bool


async def messages(request: web.Request) -> web.StreamResponse:
    """Create the next message of a conversation, or complete a message that the client began."""
    parsed = await read_body(request, MessagesRequest, lambda body: _parse(request, body))
    encoder = await request.app[ORCHESTRATOR].loaded_model(parsed.job)
    if parsed.must_think and format_of(request.app, encoder).reasoning is None:
        raise wrong(
            "thinking",
            f"the model {encoder.name!r} does not think in tags that are known here; leave it out, "
            "or send type: disabled",
        )
    job = in_form(request, encoder, parsed.job, parsed.prompt, parsed.tools)
    output = output_of(request.app, encoder, job, parsed.tools)
    if parsed.is_streamed:
        name = request[CONTEXT].answer_id
        return await stream_answer(
            request, job, parsed.prompt, lambda stream: MessageEvents(stream, name, output)
        )
    task, answer = await whole_answer(request, job, parsed.prompt, output.begin)
    ending = task.ending
    assert ending is not None
    said = output.whole(answer, ending.tail, ending)
    is_calling = output.is_calling(ending)
    body = message(task, ending, blocks_of(said), is_calling=is_calling) | task_fields(task)
    now = request.app[ORCHESTRATOR].clock.now()
    return json_response(body, headers=task_headers(task, now))


async def count_tokens(request: web.Request) -> web.Response:
    """Count the prompt tokens of a conversation."""
    orchestrator, context = request.app[ORCHESTRATOR], request[CONTEXT]
    deadline = read_headers_deadline(request)

    def parse(body: CountTokensRequest) -> tuple[str, Prompt]:
        context.field_names = {"prompt": "messages"}
        refuse_unsupported(body)
        return served_name(request, body.model), chat_of(body)[0]

    model, prompt = await read_body(request, CountTokensRequest, parse)
    key = context.key
    count = await orchestrator.questions.count_tokens(
        model, prompt, deadline, key.fingerprint, key.tenant
    )
    return json_response({"input_tokens": count})


def routes() -> list[web.RouteDef]:
    return [
        web.post("/v1/messages", messages),
        web.post("/v1/messages/count_tokens", count_tokens),
        web.post("/v1/messages/{task_id}/cancel", cancel),
    ]


def _parse(request: web.Request, body: MessagesRequest) -> ParsedMessages:
    refuse_unsupported(body)
    keep = body.on_disconnect is OnDisconnect.CONTINUE
    job = read_job_of(request, body, Api.MESSAGES, keep=keep)
    prompt, use = chat_of(body)
    return ParsedMessages(job, prompt, use, bool(body.stream), body.must_think())
