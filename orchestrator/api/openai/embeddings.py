"""``POST /v1/embeddings``: prompts as vectors of length 1, from the served model's hidden states.

Each input is a task like any other: limits, admission, the queue, placement and deadlines hold. Its
worker reads it and generates no text.
"""

import asyncio
import base64
from array import array
from dataclasses import replace
from typing import ClassVar, Literal

import msgspec
from aiohttp import web

from orchestrator.api.http.body import read_body
from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR
from orchestrator.api.http.decode import Reader
from orchestrator.api.http.fields import (
    NULL,
    GenerationRequest,
    ServedValues,
    Unused,
    read_job_of,
    refuse_unserved,
)
from orchestrator.api.http.responses import json_response, task_fields, task_headers
from orchestrator.api.openai.choices import Choices
from orchestrator.api.openai.routes import submitted
from orchestrator.api.openai.types import AnswerOptions, ParsedCompletion, read_prompts
from orchestrator.errors import InvalidRequest
from orchestrator.tasks.job import Api, OnDisconnect
from orchestrator.tasks.task import Task
from protocol import Delta, OnDeadline, Sampling

_ONLY = {
    "dimensions": ServedValues(
        lambda value: False, "vectors have the size of the model's hidden state"
    ),
    "add_special_tokens": ServedValues(bool, "an input gets the model's own; send token ids"),
    "normalize": ServedValues(bool, "vectors have length 1"),
    "truncate_prompt_tokens": ServedValues(
        lambda value: not value, "what does not fit the context is refused, not cut"
    ),
}
"""Fields of which only some values are served."""


class EmbeddingRequest(GenerationRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An embedding request, with at most 128 inputs; fields about generated text change nothing."""

    default_max_tokens: ClassVar[int | None] = 1

    input: Unused
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Unused = NULL
    user: Unused = NULL
    chat_template_kwargs: Unused = NULL
    add_special_tokens: Unused = NULL
    normalize: Unused = NULL
    truncate_prompt_tokens: Unused = NULL

    def refuse_unsupported(self) -> None:
        """Raise ``InvalidRequest`` for the first value that is not served."""
        refuse_unserved(self, _ONLY)
        if self.on_deadline is not OnDeadline.ERROR:
            raise InvalidRequest(
                "on_deadline must be error: an embedding cannot be returned in part",
                field="on_deadline",
            )
        if self.on_disconnect is not OnDisconnect.CANCEL:
            raise InvalidRequest(
                "on_disconnect must be cancel: embeddings are not kept", field="on_disconnect"
            )

    def token_limit(self) -> int | None:
        """One token, which is not returned: reading a prompt ends with it."""
        return 1

    def wanted_logprobs(self) -> int | None:
        return None

    def wants_one_piece(self) -> bool:
        return True

    def field_names(self) -> dict[str, str]:
        return {"prompt": "input"}


class _Done:
    def __init__(self, choices: Choices, over: asyncio.Event) -> None:
        self._choices = choices
        self._over = over

    def started(self, task: Task) -> None: ...

    def tokens(self, task: Task, delta: Delta) -> None: ...

    def ended(self, task: Task) -> None:
        if self._choices.ended(task):
            self._over.set()


_reader = Reader(EmbeddingRequest)


async def embed(request: web.Request) -> web.Response:
    """Compute a vector for each input, in that order."""
    parsed, as_bytes = await read_body(request, _reader, lambda body: _parse(request, body))
    tasks = await _embedded(request, Choices(request.app[ORCHESTRATOR], parsed))
    tokens = sum(task.prompt_tokens for task in tasks)
    request[CONTEXT].task = last = max(tasks, key=lambda task: task.marks.ended)
    body = {
        "object": "list",
        "data": [await _entry(index, task, as_bytes) for index, task in enumerate(tasks)],
        "model": tasks[0].model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        **task_fields(last),
    }
    headers = task_headers(last, request.app[ORCHESTRATOR].clock.now())
    return json_response(body, headers=headers)


def routes() -> list[web.RouteDef]:
    return [web.post("/v1/embeddings", embed)]


async def _embedded(request: web.Request, choices: Choices) -> list[Task]:
    """Submit a request's prompts and wait for their embeddings. Raises ``TidegateError`` when one
    of them fails, and ``InvalidRequest`` where the model does not support them."""
    orchestrator, job, over = request.app[ORCHESTRATOR], choices.request.job, asyncio.Event()
    if (await orchestrator.loaded_model(job)).card.pooling is None:
        raise InvalidRequest(
            f"the model {job.model!r} does not support embeddings: its engine generates synthetic"
            " tokens, or its worker is older than this feature",
            field="model",
        )
    listener = _Done(choices, over)
    async with submitted(request, choices, lambda index: listener):
        await over.wait()
    return choices.tasks


def _parse(request: web.Request, body: EmbeddingRequest) -> tuple[ParsedCompletion, bool]:
    body.refuse_unsupported()
    prompts = read_prompts(body.input, "input")
    job = replace(read_job_of(request, body, Api.EMBEDDINGS, keep=False), embeds=True)
    sampling = Sampling(max_tokens=1, temperature=0.0)
    parsed = ParsedCompletion(
        job=replace(job, sampling=sampling, unstated=()),
        prompts=prompts,
        n=1,
        is_streamed=False,
        options=AnswerOptions(),
    )
    return parsed, body.encoding_format == "base64"


async def _entry(index: int, task: Task, as_bytes: bool) -> msgspec.Raw:
    """One of many entries. Yields first: 128 vectors of 4096 numbers take 65 ms."""
    await asyncio.sleep(0)
    assert task.ending is not None
    data = task.ending.embedding
    vector = base64.b64encode(data).decode() if as_bytes else array("f", data).tolist()
    entry = {"object": "embedding", "index": index, "embedding": vector}
    return msgspec.Raw(msgspec.json.encode(entry))
