"""``generate`` and ``generate_stream``, as a plain Triton serves them."""

from dataclasses import replace
from typing import NamedTuple

import msgspec
from aiohttp import web

from orchestrator.api.http.body import read_body
from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR
from orchestrator.api.http.decode import Reader
from orchestrator.api.http.fields import read_job
from orchestrator.api.http.responses import (
    json_response,
    stream_answer,
    task_fields,
    task_headers,
    whole_answer,
)
from orchestrator.api.kserve.metadata import model_of, paths
from orchestrator.api.kserve.outputs import Outputs, PieceEvents
from orchestrator.api.kserve.types import GenerateRequest, read_stated
from orchestrator.errors import InvalidRequest
from orchestrator.prompts.encoder import PromptEncoder
from orchestrator.tasks.job import Api, Job, OnDisconnect, Prompt
from orchestrator.tasks.task import Task
from protocol import tensors as names

_generate_reader = Reader(GenerateRequest)


class ParsedInference(NamedTuple):
    job: Job
    prompt: Prompt
    outputs: Outputs
    prepended: str
    """Text that precedes the answer's own."""
    is_streamed: bool


async def generate(request: web.Request) -> web.Response:
    """Generate a whole answer, by field."""
    parsed = await _read_generate(request)
    _refuse_stream(parsed)
    task, outputs = await _answer(request, parsed)
    return _respond(request, task, parsed.outputs.head(task) | outputs)


async def generate_stream(request: web.Request) -> web.StreamResponse:
    """Generate an answer as server-sent events: as it comes, or as one without ``stream``."""
    parsed = await _read_generate(request)
    if parsed.is_streamed:
        return await stream_answer(
            request, parsed.job, parsed.prompt, lambda stream: PieceEvents(stream, parsed.outputs)
        )
    task, outputs = await _answer(request, parsed)
    response = _respond(request, task, parsed.outputs.head(task) | outputs)
    assert isinstance(response.body, bytes)
    return web.Response(
        body=b"data: %b\n\n" % response.body,
        content_type="text/event-stream",
        headers=task_headers(task, request.app[ORCHESTRATOR].clock.now()),
    )


def routes() -> list[web.RouteDef]:
    return [
        *(web.post(path, generate) for path in paths("/generate")),
        *(web.post(path, generate_stream) for path in paths("/generate_stream")),
    ]


async def _read_generate(request: web.Request) -> ParsedInference:
    encoder = model_of(request)
    return await read_body(request, _generate_reader, lambda body: _parse(request, body, encoder))


def _parse(request: web.Request, body: GenerateRequest, encoder: PromptEncoder) -> ParsedInference:
    if body.stream and body.exclude_input_in_output is False:
        raise InvalidRequest(
            f"{names.EXCLUDE_INPUT_IN_OUTPUT} must not be false when streaming: deltas never "
            "repeat the prompt",
            field=names.EXCLUDE_INPUT_IN_OUTPUT,
        )
    excluded = body.exclude_input_in_output
    excludes = body.stream if excluded is None else excluded
    unix_ms = 1000 * request[CONTEXT].arrival.unix
    stated = read_stated(body, encoder.name, unix_ms)
    states_logprobs = stated.logprobs is not None
    if body.return_cumulative_logprob and not states_logprobs:
        stated = msgspec.structs.replace(stated, logprobs=0)
    keep = stated.on_disconnect is OnDisconnect.CONTINUE
    job, prompt = read_job(request, stated, Api.KSERVE, keep=keep)
    if body.id:
        job = replace(job, request_id=body.id)
    return ParsedInference(
        job=job,
        prompt=prompt,
        outputs=Outputs(body, encoder, states_logprobs),
        prepended="" if excludes else body.text_input,
        is_streamed=body.stream,
    )


def _refuse_stream(parsed: ParsedInference) -> None:
    if parsed.is_streamed:
        raise InvalidRequest(
            "here the answer is one response: for a stream use generate_stream", field=names.STREAM
        )


async def _answer(request: web.Request, parsed: ParsedInference) -> tuple[Task, dict[str, object]]:
    task, answer = await whole_answer(request, parsed.job, parsed.prompt)
    ending = task.ending
    assert ending is not None
    text = parsed.prepended + answer.text() + ending.tail
    reason = ending.finish_reason.value
    return task, parsed.outputs.piece(task, text, answer.ids, answer.logprobs, reason)


def _respond(request: web.Request, task: Task, body: dict[str, object]) -> web.Response:
    headers = task_headers(task, request.app[ORCHESTRATOR].clock.now())
    return json_response(body | task_fields(task), headers=headers)
