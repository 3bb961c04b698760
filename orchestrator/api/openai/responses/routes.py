"""``/v1/responses``: create a response, fetch, continue, cancel and delete it."""

import msgspec
from aiohttp import web

from orchestrator.api.http.body import read_body
from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR
from orchestrator.api.http.field_errors import wrong
from orchestrator.api.http.fields import read_job_of
from orchestrator.api.http.finding import cancel_tasks
from orchestrator.api.http.outputs import in_form, output_of
from orchestrator.api.http.responses import (
    json_response,
    stream_answer,
    task_headers,
    until_answered,
)
from orchestrator.api.http.tools import EFFORT, effort_argument, template_arguments
from orchestrator.api.openai.responses.items import Turns, conversation, joined
from orchestrator.api.openai.responses.output import (
    OutputCollector,
    ResponseEvents,
    response_id,
    status_of,
)
from orchestrator.api.openai.responses.store import ResponseStore, Stored
from orchestrator.api.openai.responses.tools import asked_tools
from orchestrator.api.openai.responses.types import ParsedResponses, ResponsesRequest, echo_of
from orchestrator.errors import InvalidRequest, NotFound
from orchestrator.tasks.job import Api, Chat, Message, OnDisconnect
from orchestrator.tasks.task import Task
from protocol import excerpt

RESPONSES = web.AppKey("responses", ResponseStore)


async def create(request: web.Request) -> web.StreamResponse:
    """Create the next turn of a conversation."""
    asked = await read_body(request, ResponsesRequest, lambda body: _parse(request, body))
    orchestrator, store = request.app[ORCHESTRATOR], request.app[RESPONSES]
    history, chat = _conversation(request, asked)
    encoder = await orchestrator.loaded_model(asked.job)
    job = in_form(request, encoder, asked.job, chat, asked.tools.use)
    output = output_of(request.app, encoder, job, asked.tools.use)

    def keep(task: Task, answer: OutputCollector) -> None:
        ending = task.ending
        if asked.is_stored and ending is not None and ending.error is None:
            body = msgspec.json.encode(answer.body(task))
            store.put(job.key, response_id(task.id), Stored(body, history, answer.turns()))

    if asked.is_streamed:
        return await stream_answer(
            request, job, chat, lambda stream: ResponseEvents(stream, asked, output, keep)
        )
    answer = OutputCollector(asked, output, keep)
    task = await until_answered(request, job, chat, answer, answer.complete)
    headers = task_headers(task, orchestrator.clock.now())
    return json_response(answer.body(task), headers=headers)


async def retrieve(request: web.Request) -> web.Response:
    """Fetch an ended response."""
    for field in ("stream", "starting_after"):
        if request.query.get(field, "false") != "false":
            why = "a response's events are sent only to its own request; to read events again, use"
            raise wrong(field, f"{why} /v2/tasks")
    return json_response(msgspec.Raw(request.app[RESPONSES].get(*_named(request)).body))


async def cancel(request: web.Request) -> web.Response:
    """Cancel a running response. An ended response stays unchanged (OR-21)."""
    key, name = _named(request)
    try:
        return json_response(msgspec.Raw(request.app[RESPONSES].get(key, name).body))
    except NotFound:
        (task, *_) = await cancel_tasks(request, name)
    body = {"id": response_id(task.id), "object": "response", "status": status_of(task.ending)}
    return json_response(body | {"model": task.served_name})


async def delete(request: web.Request) -> web.Response:
    """Delete a response."""
    key, name = _named(request)
    request.app[RESPONSES].delete(key, name)
    return json_response({"id": name, "object": "response", "deleted": True})


def routes() -> list[web.RouteDef]:
    return [
        web.post("/v1/responses", create),
        web.get("/v1/responses/{response_id}", retrieve),
        web.delete("/v1/responses/{response_id}", delete),
        web.post("/v1/responses/{response_id}/cancel", cancel),
    ]


def _parse(request: web.Request, body: ResponsesRequest) -> ParsedResponses:
    body.refuse_unsupported()
    keep = body.on_disconnect is OnDisconnect.CONTINUE
    job = read_job_of(request, body, Api.RESPONSES, keep=keep)
    stated = None if body.reasoning is None else body.reasoning.effort
    effort = effort_argument(request, job.model, stated, "reasoning", "effort")
    return ParsedResponses(
        job=job,
        created_unix=int(request[CONTEXT].arrival.unix),
        instructions=body.instructions,
        turns=Turns.of(body.input),
        tools=asked_tools(
            body.tools, body.tool_choice, is_parallel=body.parallel_tool_calls is not False
        ),
        template_arguments={**effort, **template_arguments(body.chat_template_kwargs)},
        previous_id=body.previous_response_id,
        is_streamed=bool(body.stream),
        is_stored=body.store is not False,
        echo=echo_of(body, job.priority, effort.get(EFFORT)),
    )


def _conversation(request: web.Request, asked: ParsedResponses) -> tuple[tuple[Message, ...], Chat]:
    """All turns without instructions, and the model's input. Raises ``InvalidRequest``."""
    key, store = asked.job.key, request.app[RESPONSES]
    history = joined(
        _earlier(store, key, asked.previous_id),
        asked.turns,
        lambda task_id: store.answer(key, response_id(task_id)),
    )
    messages = conversation(asked.instructions, history)
    if not messages:
        raise InvalidRequest("input is empty; send at least one message", field="input")
    chat = Chat(
        messages,
        template_arguments=asked.template_arguments,
        tools=() if asked.tools.use is None else asked.tools.use.tools,
    )
    return history, chat


def _earlier(store: ResponseStore, key: str, name: str | None) -> tuple[Message, ...]:
    """The conversation that a request continues. Raises ``InvalidRequest`` with OpenAI's status,
    wording and code. These make clients send the whole conversation."""
    if name is None:
        return ()
    try:
        return store.get(key, name).messages
    except NotFound:
        error = InvalidRequest(
            f"Previous response with id {excerpt(name, 64)!r} not found: responses are kept only "
            "for a while, and not with store: false; send the conversation as input",
            field="previous_response_id",
            details={"code": "previous_response_not_found"},
        )
        error.item_id = name
        raise error from None


def _named(request: web.Request) -> tuple[str, str]:
    return request[CONTEXT].key.fingerprint, request.match_info["response_id"]
