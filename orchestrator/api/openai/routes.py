"""``/v1``: OpenAI's chat completions, completions and models; the official SDK works unmodified."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from aiohttp import web

from orchestrator.api.config import CONFIG
from orchestrator.api.http.body import read_body
from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR, listed_aliases, served_name
from orchestrator.api.http.event_stream import EventStream
from orchestrator.api.http.fields import read_job_of
from orchestrator.api.http.finding import cancel
from orchestrator.api.http.outputs import TaskOutput, format_of, in_form, output_of
from orchestrator.api.http.responses import (
    deadline_headers,
    json_response,
    task_fields,
    task_headers,
)
from orchestrator.api.http.tools import effort_argument
from orchestrator.api.openai import echo
from orchestrator.api.openai.choices import Choices
from orchestrator.api.openai.chunks import ChunkStream, ParsedChunkStream
from orchestrator.api.openai.shapes import CHAT, COMPLETION, Shape, stop_reason, stop_text
from orchestrator.api.openai.types import (
    ChatRequest,
    CompletionRequest,
    OpenAiRequest,
    ParsedCompletion,
)
from orchestrator.errors import InvalidRequest, TidegateError
from orchestrator.prompts.encoder import PromptEncoder
from orchestrator.tasks.job import Api, Chat, OnDisconnect
from orchestrator.tasks.task import Listener, Task
from orchestrator.tasks.transcript import Transcript


async def chat(request: web.Request) -> web.StreamResponse:
    """Answer a chat."""
    parsed = await read_body(request, ChatRequest, lambda body: _parse(request, body, Api.CHAT))
    return await _complete(request, parsed, CHAT)


async def completion(request: web.Request) -> web.StreamResponse:
    """Continue a text."""
    parsed = await read_body(
        request, CompletionRequest, lambda body: _parse(request, body, Api.COMPLETIONS)
    )
    return await _complete(request, parsed, COMPLETION)


async def models(request: web.Request) -> web.Response:
    """List every model that is served or that a request can load."""
    demand = request.app[ORCHESTRATOR].stages.demand
    states = demand.states()
    data = [_model(request, name, name) for name in sorted(states)]
    data += [
        _model(request, name, alias)
        for alias, name in sorted(listed_aliases(request.app).items())
        if name in states and alias not in states
    ]
    return json_response({"object": "list", "data": data})


async def model(request: web.Request) -> web.Response:
    """Show one model by name."""
    orchestrator = request.app[ORCHESTRATOR]
    stated = request.match_info["model"]
    name = served_name(request, stated)
    orchestrator.questions.require_known(name)
    return json_response(_model(request, name, stated))


def routes() -> list[web.RouteDef]:
    return [
        web.post("/v1/chat/completions", chat),
        web.post("/v1/completions", completion),
        web.post("/v1/chat/completions/{task_id}/cancel", cancel),
        web.post("/v1/completions/{task_id}/cancel", cancel),
        web.get("/v1/models", models),
        web.get("/v1/models/{model:.+}", model),
    ]


def _parse(request: web.Request, body: OpenAiRequest, api: Api) -> ParsedCompletion:
    body.refuse_unsupported()
    keep = body.on_disconnect is OnDisconnect.CONTINUE
    job = read_job_of(request, body, api, keep=keep)
    use = body.tool_use()
    prompts = body.prompts(use)
    if isinstance(body, ChatRequest):
        told = effort_argument(request, job.model, body.reasoning_effort)
        prompts = tuple(
            replace(chat, template_arguments={**told, **chat.template_arguments})
            for chat in prompts
            if isinstance(chat, Chat)
        )
    n = body.choices_per_prompt(len(prompts))
    if keep and n * len(prompts) > 1:
        raise InvalidRequest(
            "on_disconnect: continue needs exactly one choice of one prompt: an answer names only "
            "its first task, so the texts of other tasks could never be fetched",
            field="on_disconnect",
        )
    options = body.answer_options()
    return ParsedCompletion(
        job=replace(job, needs_ids=True) if options.token_ids else job,
        prompts=prompts,
        n=n,
        is_streamed=bool(body.stream),
        options=options,
        tools=use,
    )


async def _complete(
    request: web.Request, parsed: ParsedCompletion, shape: Shape
) -> web.StreamResponse:
    if shape.is_chat and (parsed.tools is not None or parsed.job.grammar is not None):
        encoder = await request.app[ORCHESTRATOR].loaded_model(parsed.job)
        job = in_form(request, encoder, parsed.job, parsed.prompts[0], parsed.tools)
        parsed = parsed._replace(job=job)
    choices = Choices(request.app[ORCHESTRATOR], parsed)
    created = int(request[CONTEXT].arrival.unix)
    if parsed.is_streamed:
        return await _stream(request, choices, shape, created)
    return await _answer(request, choices, shape, created)


async def _stream(
    request: web.Request, choices: Choices, shape: Shape, created: int
) -> web.StreamResponse:
    orchestrator, job = request.app[ORCHESTRATOR], choices.request.job
    stream = EventStream(request, {}, request.app[CONFIG].keepalive_s)

    def listener_of(index: int) -> Listener:
        new_stream: Callable[..., ChunkStream] = ChunkStream
        if shape.is_chat and not (output := _output_of(request, choices)).is_plain:
            new_stream = partial(ParsedChunkStream, output)
        return new_stream(
            stream,
            shape,
            choices,
            index,
            created=created,
            encoder_of=lambda: orchestrator.models.resolve(job.model),
        )

    async with _submitted(request, choices, listener_of, stream):
        assert choices.first is not None
        stream.headers |= deadline_headers(choices.first.deadline)
        stream.on_behind = lambda: choices.mark_reading(not stream.is_behind)
        try:
            return await stream.run()
        except TidegateError:
            request[CONTEXT].task = choices.failed or choices.first
            raise


async def _answer(
    request: web.Request, choices: Choices, shape: Shape, created: int
) -> web.Response:
    orchestrator, over = request.app[ORCHESTRATOR], asyncio.Event()
    texts = [_Text(choices, over) for _ in range(choices.count)]

    def listener_of(index: int) -> Listener:
        if shape.is_chat:
            texts[index].output = _output_of(request, choices)
        return texts[index]

    async with _submitted(request, choices, listener_of):
        await over.wait()
    tasks = choices.tasks
    request[CONTEXT].task = last = max(tasks, key=lambda task: task.marks.ended)
    encoder = orchestrator.models.resolve(last.model)
    told = [
        await text.choice(index, task, shape, encoder)
        for index, (text, task) in enumerate(zip(texts, tasks, strict=True))
    ]
    body = shape.head(tasks[0], created, chunk=False) | {
        "choices": told,
        "usage": choices.usage(),
        **choices.told_tier(),
        **task_fields(last),
    }
    if shape.is_chat and choices.request.options.token_ids:
        body["prompt_token_ids"] = texts[0].prompt_ids
    return json_response(body, headers=task_headers(last, orchestrator.clock.now()))


@asynccontextmanager
async def _submitted(
    request: web.Request,
    choices: Choices,
    listener_of: Callable[[int], Listener],
    stream: EventStream | None = None,
) -> AsyncIterator[None]:
    """Submit all choices for the block. Running choices end with the block. Raises the error of a
    failed choice, unless a ``stream`` reports it."""
    try:
        try:
            await choices.submit(listener_of)
        except TidegateError:
            choices.cancel()
            raise
        request[CONTEXT].task = choices.first
        yield
        if stream is None and choices.failed is not None:
            assert choices.failed.ending is not None and choices.failed.ending.error is not None
            request[CONTEXT].task = choices.failed
            raise choices.failed.ending.error
    finally:
        choices.leave(too_slow=stream is not None and stream.too_slow)


class _Text(Transcript):
    """The transcript of one choice, for an answer in one piece."""

    __slots__ = ("_choices", "_over", "output", "prompt_ids")

    def __init__(self, choices: Choices, over: asyncio.Event) -> None:
        super().__init__()
        self._choices = choices
        self._over = over
        self.prompt_ids: Sequence[int] = ()
        self.output: TaskOutput | None = None

    def started(self, task: Task) -> None:  # type: ignore[override]  # it hears tasks only
        if self._choices.request.options.needs_prompt_ids:
            self.prompt_ids = list(task.token_ids)  # an ended task no longer has them
        if self.output is not None:
            self.output.begin(task)

    def ended(self, task: Task) -> None:  # type: ignore[override]
        if self._choices.ended(task):
            self._over.set()

    async def choice(
        self, index: int, task: Task, shape: Shape, encoder: PromptEncoder
    ) -> dict[str, object]:
        """The choice as a part of the answer."""
        if index:
            await asyncio.sleep(0)  # choices may be long, and there may be a hundred
        ending, options = task.ending, self._choices.request.options
        assert ending is not None
        tail, logprobs = ending.tail, None
        if self.logprobs:
            logprobs = await shape.logprobs_in_turns(
                self.ids, self.texts, self.logprobs, encoder.tokens.token
            )
        if options.stop_in_text:
            tail += stop_text(ending, encoder.tokens)
        reason = ending.finish_reason.value
        if self.output is None:
            choice = shape.delta(index, self.text() + tail, logprobs, reason)
        else:
            said = self.output.whole(self, tail, ending)
            reason = "tool_calls" if self.output.is_calling(ending) else reason
            choice = shape.message(index, said, logprobs, reason, self._choices.request.free_texts)
        choice["stop_reason"] = stop_reason(ending)
        if options.token_ids:
            choice["token_ids"] = self.ids
            if not shape.is_chat:
                choice["prompt_token_ids"] = self.prompt_ids
        if options.echo:
            prompt = self._choices.prompt_of(index)
            await echo.add_echo(choice, prompt, self.prompt_ids, task, encoder.tokens)
        return choice


def _output_of(request: web.Request, choices: Choices) -> TaskOutput:
    """Parser of one choice's output. Its prompt must have been read."""
    job = choices.request.job
    encoder = request.app[ORCHESTRATOR].models.resolve(job.model)
    return output_of(request.app, encoder, job, choices.request.tools)


def _model(request: web.Request, name: str, asked: str) -> dict[str, object]:
    """A model under the requested name, with Anthropic's and vLLM's fields and ours: the formats of
    its tool calls and thinking, and whether it is loaded. If it is not loaded, only its name and
    size are known."""
    orchestrator = request.app[ORCHESTRATOR]
    demand = orchestrator.stages.demand
    state, loadable = demand.states().get(name, "loaded"), demand.loadable().get(name)
    encoder = None if state != "loaded" else orchestrator.models.resolve(name)
    format = None if encoder is None else format_of(request.app, encoder)
    return {
        "id": asked,
        "object": "model",
        "created": orchestrator.started_unix,
        "owned_by": "tidegate",
        "type": "model",
        "display_name": asked,
        "created_at": datetime.fromtimestamp(orchestrator.started_unix, UTC).isoformat(),
        "root": name,
        "parent": None if encoder is None or encoder.adapter is None else encoder.card.model,
        "max_model_len": None if encoder is None else encoder.card.context_tokens,
        "tool_format": (
            format.calls
            if encoder is not None and format is not None and encoder.knows_tools
            else None
        ),
        "reasoning_format": None if format is None else format.reasoning_name,
        "state": state,
        "bytes": None if loadable is None else loadable.bytes,
    }
