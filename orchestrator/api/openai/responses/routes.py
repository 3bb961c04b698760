"""``/v1/responses``: create a response, fetch, continue, cancel and delete it."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec
from aiohttp import web

from orchestrator.api.http.body import read_body
from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR
from orchestrator.api.http.decode import Reader
from orchestrator.api.http.event_stream import EventStream
from orchestrator.api.http.field_errors import wrong
from orchestrator.api.http.fields import read_job_of
from orchestrator.api.http.finding import cancel_tasks
from orchestrator.api.http.outputs import TaskOutput, in_form, output_of
from orchestrator.api.http.responses import (
    json_response,
    stream_answer,
    task_headers,
    until_answered,
)
from orchestrator.api.http.tools import EFFORT, effort_argument, read_call, template_arguments
from orchestrator.api.openai.responses.items import Turns, conversation, joined
from orchestrator.api.openai.responses.output import (
    ItemKind,
    OutputItems,
    response,
    response_id,
    status_of,
)
from orchestrator.api.openai.responses.store import ResponseStore, Stored
from orchestrator.api.openai.responses.tools import asked_tools
from orchestrator.api.openai.responses.types import ParsedResponses, ResponsesRequest, echo_of
from orchestrator.errors import InvalidRequest, NotFound
from orchestrator.parsing.pieces import Reasoning
from orchestrator.tasks.job import Api, Chat, Message, OnDisconnect, ToolCall
from orchestrator.tasks.task import Task
from protocol import Delta, excerpt

RESPONSES = web.AppKey("responses", ResponseStore)

_reader = Reader(ResponsesRequest)


async def create(request: web.Request) -> web.StreamResponse:
    """Create the next turn of a conversation."""
    asked = await read_body(request, _reader, lambda body: _parse(request, body))
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
    return _answer(request.app[RESPONSES].get(*_named(request)).body)


async def cancel(request: web.Request) -> web.Response:
    """Cancel a running response. An ended response stays unchanged (OR-21)."""
    key, name = _named(request)
    try:
        return _answer(request.app[RESPONSES].get(key, name).body)
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
        echo={
            **echo_of(body, job.priority),
            "reasoning": {"effort": effort.get(EFFORT), "summary": None},
        },
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


def _answer(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _named(request: web.Request) -> tuple[str, str]:
    return request[CONTEXT].key.fingerprint, request.match_info["response_id"]


class OutputCollector:
    """Collects a task's output. ``output`` parses it; ``keep`` receives the result."""

    def __init__(
        self,
        asked: ParsedResponses,
        output: TaskOutput,
        keep: Callable[[Task, "OutputCollector"], None],
    ) -> None:
        self.asked = asked
        self.complete = asyncio.Event()
        self._items = OutputItems(self._tell, asked.tools.origins)
        self._output = output
        self._keep = keep
        self._tokens = 0
        self._reasoning_tokens = 0

    # as a listener

    def started(self, task: Task) -> None:
        self._items.begin(task.id)
        self._output.begin(task)

    def tokens(self, task: Task, delta: Delta) -> None:
        for token_id, text in zip(delta.ids, delta.texts, strict=True):
            self._tokens += 1
            pieces = self._output.feed_token(token_id, text)
            if any(isinstance(piece, Reasoning) for piece in pieces):
                self._reasoning_tokens = self._tokens
            self._items.add(pieces)

    def ended(self, task: Task) -> None:
        ending = task.ending
        assert ending is not None
        self._items.begin(task.id)
        if ending.error is None:
            self._items.add(self._output.finish(ending.tail, ending))
            self._items.finish(status_of(ending))
        else:
            self._items.stop()
        self._keep(task, self)
        self.complete.set()

    def _tell(self, kind: str, fields: Mapping[str, object]) -> None:
        """Handle an event. The default does nothing."""

    # its current state

    def body(self, task: Task) -> dict[str, object]:
        output, reasoning = [item.body() for item in self._items.items], self._reasoning_tokens
        status = status_of(task.ending)
        return response(task, self.asked, status, output, reasoning_tokens=reasoning)

    def turns(self) -> tuple[Message, ...]:
        """The turns that this response adds to the conversation."""
        items = self._items.items
        content = "".join([item.text for item in items if item.kind is ItemKind.MESSAGE])
        calls = self._calls()
        if not (content or calls):
            return ()
        thoughts = [item.text for item in items if item.kind is ItemKind.REASONING] if calls else []
        return (Message("assistant", content, calls=calls, reasoning="".join(thoughts)),)

    def _calls(self) -> tuple[ToolCall, ...]:
        calls = []
        for item in self._items.items:
            if item.kind is ItemKind.CALL and item.status == "completed":
                with suppress(InvalidRequest):  # nested too deeply for a template
                    calls.append(read_call(item.call_id, item.name, item.text, "arguments"))
        return tuple(calls)


_encode = msgspec.json.Encoder().encode


class ResponseEvents(OutputCollector):
    """Turns one task's tokens into events. Listens to the task; ``stream`` sends the events."""

    def __init__(
        self,
        stream: EventStream,
        asked: ParsedResponses,
        output: TaskOutput,
        keep: Callable[[Task, OutputCollector], None],
    ) -> None:
        super().__init__(asked, output, keep)
        self._stream = stream
        self._events: list[bytes] = []
        """Encoded events that are sent together."""
        self._number = 0
        self._has_begun = False

    # as a listener

    def tokens(self, task: Task, delta: Delta) -> None:
        self._begin(task)
        super().tokens(task, delta)
        events, self._events = b"".join(self._events), []
        self._stream.send(events)

    def ended(self, task: Task) -> None:
        ending = task.ending
        assert ending is not None
        if ending.error is not None and self._stream.refuse(ending.error):
            super().ended(task)
            return
        self._begin(task)
        super().ended(task)
        status = status_of(ending)
        last = {"response": self.body(task) | {"deadline_budget": str(ending.budget)}}
        self._tell(status if status in ("completed", "incomplete") else "failed", last)
        self._stream.finish(b"".join(self._events))

    # inside

    def _begin(self, task: Task) -> None:
        """Emit the first events of a response, once."""
        if not self._has_begun:
            self._has_begun = True
            for kind in ("created", "in_progress"):
                self._tell(kind, {"response": response(task, self.asked, "in_progress")})

    def _tell(self, kind: str, fields: Mapping[str, object]) -> None:
        event = f"response.{kind}"
        encoded = _encode({"type": event, "sequence_number": self._number, **fields})
        self._events.append(b"event: %b\ndata: %b\n\n" % (event.encode(), encoded))
        self._number += 1
