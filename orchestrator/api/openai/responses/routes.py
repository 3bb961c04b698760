"""``/v1/responses``: create a response, fetch it again, continue from it, cancel, delete."""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import msgspec
from aiohttp import web

from orchestrator.api.config import CONFIG
from orchestrator.api.http.answer_ids import task_id_of
from orchestrator.api.http.body import INLINE_BYTES, read_body
from orchestrator.api.http.cancelling import cancel_tasks
from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR
from orchestrator.api.http.decode import Reader
from orchestrator.api.http.event_stream import SSE_HEADERS, EventStream
from orchestrator.api.http.fields import read_job_of
from orchestrator.api.http.one_answer import stream_answer, until_answered
from orchestrator.api.http.outputs import in_form, output_of
from orchestrator.api.http.responses import deadline_headers, json_response, task_headers
from orchestrator.api.http.template_arguments import template_arguments
from orchestrator.api.openai.responses.answer import OutputCollector
from orchestrator.api.openai.responses.background import Background, BackgroundAnswer
from orchestrator.api.openai.responses.conversation_store import ConversationStore
from orchestrator.api.openai.responses.conversations import CONVERSATIONS
from orchestrator.api.openai.responses.events import ResponseEvents
from orchestrator.api.openai.responses.items import conversation, joined, turns_of
from orchestrator.api.openai.responses.kept_items import items_of, page_of_items, turns_of_kept
from orchestrator.api.openai.responses.replay import replay
from orchestrator.api.openai.responses.shapes import response_id, status_of
from orchestrator.api.openai.responses.store import ResponseStore, RunningResponse, Stored
from orchestrator.api.openai.responses.tools import tool_use_of
from orchestrator.api.openai.responses.truncation import truncated
from orchestrator.api.openai.responses.types import ParsedResponses, ResponsesRequest, echo_of
from orchestrator.errors import InvalidRequest, NotFound
from orchestrator.service import Orchestrator
from orchestrator.tasks.job import Api, Chat, Job, Message, OnDisconnect
from orchestrator.tasks.task import Task
from protocol import excerpt

RESPONSES = web.AppKey("responses", ResponseStore)

_reader = Reader(ResponsesRequest)
_MAX_ITEMS_INLINE = 500
"""Most items of a conversation that are read on the event loop, in a millisecond or so."""
_FROM_THE_FIRST = -1
"""The number after which all events come."""
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)


async def create(request: web.Request) -> web.StreamResponse:
    """Create the next turn of a conversation."""
    asked = await read_body(request, _reader, lambda body: _parse(request, body))
    orchestrator, store = request.app[ORCHESTRATOR], request.app[RESPONSES]
    conversations = request.app[CONVERSATIONS]
    read = await _conversation(request, asked)
    encoder, job = await orchestrator.loaded_model(asked.job), asked.job
    with orchestrator.counting_refusal(job):
        read = await _truncated(orchestrator, asked, read)
    job = in_form(request, encoder, job, read.chat, asked.tools)
    output = output_of(request.app, encoder, job, asked.tools)

    def keep(task: Task, answer: OutputCollector) -> None:
        ending = task.ending
        is_well = ending is not None and ending.error is None
        if asked.is_stored and (is_well or asked.is_background):
            body = msgspec.json.encode(answer.body(task))
            stored = Stored(body, read.history, answer.turns(), answer.pieces())
            store.put(job.key, response_id(task.id), stored)
        if is_well and asked.conversation_id is not None:
            items = [*items_of(read.new, task.id, read.earlier), *answer.kept_items()]
            conversations.answered(job.key, asked.conversation_id, items)

    if asked.is_background:
        background = BackgroundAnswer(asked, output, encoder.tokens.token, keep)
        return await _begin(request, asked.is_streamed, job, background, read)
    if asked.is_streamed:
        return await stream_answer(
            request,
            job,
            read.chat,
            lambda stream: ResponseEvents(stream, asked, output, encoder.tokens.token, keep),
        )
    answer = OutputCollector(asked, output, encoder.tokens.token, keep)
    task = await until_answered(request, job, read.chat, answer)
    headers = task_headers(task, orchestrator.clock.now())
    return json_response(answer.body(task), headers=headers)


async def count_tokens(request: web.Request) -> web.Response:
    """Count the tokens that a request would have as a prompt."""
    asked = await read_body(request, _reader, lambda body: _parse(request, body))
    job = asked.job
    read = await _conversation(request, asked)
    orchestrator = request.app[ORCHESTRATOR]
    read = await _truncated(orchestrator, asked, read)
    ids = await orchestrator.tokenize(job.model, read.chat, job.deadline, job.key, job.tenant)
    return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})


async def retrieve(request: web.Request) -> web.StreamResponse:
    """Fetch a response, or with ``stream`` its events: those so far, and those that come."""
    stream, after = request.query.get("stream", "false"), request.query.get("starting_after")
    if stream not in ("true", "false"):
        raise InvalidRequest("stream must be true or false", field="stream")
    if after is not None and not (stream == "true" and _NUMBER.fullmatch(after)):
        raise InvalidRequest(
            "starting_after must be the number of an event, with stream=true",
            field="starting_after",
        )
    if stream == "false":
        return _answer(request.app[RESPONSES].body(*_named(request)))
    return await _replay(request, _FROM_THE_FIRST if after is None else int(after))


async def input_items(request: web.Request) -> web.Response:
    """List the items that a stored response was made from."""
    key, name = _named(request)
    history = request.app[RESPONSES].history(key, name)
    items = items_of(history, task_id_of(name))
    return json_response(page_of_items(items, request.query))


async def cancel(request: web.Request) -> web.Response:
    """Cancel a response, whether it is made in the background or somebody waits for it (OR-21)."""
    key, name = _named(request)
    try:
        return _answer(request.app[RESPONSES].cancel(key, name))
    except NotFound:
        (task, *_) = await cancel_tasks(request, name)
    status = status_of(task.ending)
    body = {
        "id": response_id(task.id),
        "object": "response",
        "status": status,
        "model": task.served_name,
    }
    return json_response(body)


async def delete(request: web.Request) -> web.Response:
    """Delete a response."""
    key, name = _named(request)
    request.app[RESPONSES].delete(key, name)
    return json_response({"id": name, "object": "response", "deleted": True})


def routes() -> list[web.RouteDef]:
    return [
        web.post("/v1/responses", create),
        web.post("/v1/responses/input_tokens", count_tokens),
        web.get("/v1/responses/{response_id}", retrieve),
        web.delete("/v1/responses/{response_id}", delete),
        web.get("/v1/responses/{response_id}/input_items", input_items),
        web.post("/v1/responses/{response_id}/cancel", cancel),
    ]


def _parse(request: web.Request, body: ResponsesRequest) -> ParsedResponses:
    body.refuse_unsupported()
    keep = body.on_disconnect is OnDisconnect.CONTINUE
    job = read_job_of(request, body, Api.RESPONSES, keep=keep)
    return ParsedResponses(
        job=job,
        created_unix=int(request[CONTEXT].arrival.unix),
        instructions=body.instructions,
        turns=turns_of(body.input),
        tools=tool_use_of(
            body.tools, body.tool_choice, is_parallel=body.parallel_tool_calls is not False
        ),
        template_arguments=template_arguments(body.chat_template_kwargs),
        previous_id=body.previous_response_id,
        conversation_id=body.conversation_id(),
        is_streamed=bool(body.stream),
        is_background=bool(body.background),
        is_stored=body.store is not False,
        is_truncated=body.truncation == "auto",
        echo=echo_of(body, job.priority),
    )


async def _begin(
    request: web.Request,
    is_streamed: bool,
    job: Job,
    answer: BackgroundAnswer,
    read: "_Conversation",
) -> web.StreamResponse:
    """Submit a background response, and answer at once, or with its events; it can be fetched and
    followed from then on."""
    orchestrator = request.app[ORCHESTRATOR]
    request[CONTEXT].task = task = await orchestrator.submit(job, read.chat, [answer])
    running = Background(orchestrator, task, answer, read.history)
    if task.ending is None:
        request.app[RESPONSES].begin(job.key, response_id(task.id), running)
    if is_streamed:
        return await _follow(request, running, _FROM_THE_FIRST, deadline_headers(task.deadline))
    return _answer(running.body(), headers=task_headers(task, orchestrator.clock.now()))


async def _follow(
    request: web.Request,
    running: RunningResponse,
    after: int,
    headers: Mapping[str, str] | None = None,
) -> web.StreamResponse:
    stream = EventStream(request, headers or {}, request.app[CONFIG].keepalive_s)
    try:
        return await stream.run(running.follow(stream, after))
    finally:
        running.leave(stream)


class _Conversation(NamedTuple):
    """What a request is answered from."""

    history: tuple[Message, ...]
    """All turns, without instructions."""
    earlier: int
    """Number of turns that came before the request."""
    chat: Chat
    """What the model is to read."""

    @property
    def new(self) -> tuple[Message, ...]:
        """The request's own turns."""
        return self.history[self.earlier :]


async def _conversation(request: web.Request, asked: ParsedResponses) -> _Conversation:
    """The conversation that a request goes on with, and its own turns. Raises ``InvalidRequest``,
    and ``NotFound`` for a kept conversation that is gone."""
    key, store = asked.job.key, request.app[RESPONSES]
    if asked.conversation_id is None:
        earlier = _earlier(store, key, asked.previous_id)
    else:
        earlier = await _kept_turns(request.app[CONVERSATIONS], key, asked.conversation_id)
    history = joined(
        earlier,
        asked.turns,
        lambda task_id: store.answer(key, response_id(task_id)),
    )
    if asked.conversation_id is not None and any(one.parts for one in history[len(earlier) :]):
        raise InvalidRequest(
            "input: a conversation keeps no images; leave conversation out, and go on with "
            "previous_response_id",
            field="input",
        )
    messages = conversation(asked.instructions, history)
    if not messages:
        raise InvalidRequest("input is empty; it needs at least one message", field="input")
    chat = Chat(
        messages,
        template_arguments=asked.template_arguments,
        tools=() if asked.tools is None else asked.tools.tools,
    )
    return _Conversation(history, len(earlier), chat)


async def _truncated(
    orchestrator: Orchestrator, asked: ParsedResponses, read: _Conversation
) -> _Conversation:
    """The conversation with a chat that fits the model's context, where the request wants that.
    Raises ``TidegateError``."""
    if not asked.is_truncated:
        return read

    def chat_of(history: tuple[Message, ...]) -> Chat:
        return replace(read.chat, messages=conversation(asked.instructions, history))

    kept = await truncated(
        read.history, lambda history: orchestrator.fits(asked.job, chat_of(history))
    )
    return read._replace(chat=chat_of(kept))


async def _kept_turns(store: ConversationStore, key: str, name: str) -> tuple[Message, ...]:
    """The turns of a conversation that is kept. Raises ``NotFound``, as OpenAI does."""
    try:
        items = store.get(key, name).items
    except NotFound as error:
        error.field = "conversation"
        raise
    if len(items) <= _MAX_ITEMS_INLINE:
        return turns_of_kept(items.values())
    return await asyncio.to_thread(turns_of_kept, tuple(items.values()))


def _earlier(store: ResponseStore, key: str, name: str | None) -> tuple[Message, ...]:
    """The conversation that a request continues. Raises ``InvalidRequest`` with OpenAI's status,
    wording and code, by which clients know to send all of it again."""
    if name is None:
        return ()
    try:
        return store.get(key, name).messages
    except NotFound:
        error = InvalidRequest(
            f"Previous response with id {excerpt(name, 64)!r} not found: responses are kept for a "
            "while only, and not with store: false; send the conversation as input",
            field="previous_response_id",
            details={"code": "previous_response_not_found"},
        )
        error.item_id = name
        raise error from None


async def _replay(request: web.Request, after: int) -> web.StreamResponse:
    (key, name), store = _named(request), request.app[RESPONSES]
    running = store.running(key, name)
    if running is not None:
        return await _follow(request, running, after)
    stored = store.get(key, name)
    if len(stored.body) <= INLINE_BYTES:
        events = replay(stored.body, stored.pieces, after)
    else:
        events = await asyncio.to_thread(replay, stored.body, stored.pieces, after)
    return web.Response(body=events, headers=SSE_HEADERS)


def _answer(body: bytes, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=body, content_type="application/json", headers=headers)


def _named(request: web.Request) -> tuple[str, str]:
    return request[CONTEXT].key.fingerprint, request.match_info["response_id"]
