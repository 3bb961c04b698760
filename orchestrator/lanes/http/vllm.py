"""A lane to vLLM's own server, by its OpenAI completions: takes token ids, gives ids and text.

A closed connection aborts the request in vLLM's engine, after the step under way and the server's
own turn. The server has no deadline: the lane's is all there is.
"""

import asyncio
import re
from contextlib import aclosing, suppress
from typing import Any, Final

import msgspec

from orchestrator.lanes.cards import ModelFolder, ServerFacts
from orchestrator.lanes.http.http_lane import (
    HttpLane,
    ServerEvent,
    count_of,
    decoded,
)
from orchestrator.lanes.lane_job import Finish, JobFailed, LaneJob, Piece, ServerLost
from orchestrator.lanes.plain_contract import vllm_sampling
from protocol import (
    Code,
    FinishReason,
    TokenLogprob,
)

USAGE_S: Final = 1.0
"""Seconds that a text that has ended waits for the server's usage report."""
_IDS_SINCE: Final = (0, 10, 2)
_RUNNING = re.compile(
    rb"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})?\s+([\d.e+]+)", re.MULTILINE
)
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")
_TOKEN = "token_id:"
_DONE = memoryview(b"[DONE]")


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(ServerEvent):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Chunk)


class VllmLane(HttpLane):
    """A lane to one ``vllm serve``."""

    abort_ms = 65.0
    """Ms until an aborted job's slot is free: 27 to 63 measured (0.32, a small model on a CPU):
    a step, and a turn of the server's loop."""
    slots = 64
    """vLLM takes more and queues them itself."""
    running = _RUNNING
    takes_ids = True
    _model = ""

    async def _facts(self, folder: ModelFolder) -> ServerFacts:
        models = (await self._get_object("/v1/models")).get("data")
        served = {
            str(one.get("id")): one
            for one in (models if isinstance(models, list) else ())
            if isinstance(one, dict)
        }
        wanted = self.endpoint.model
        if not served or (wanted and wanted not in served):
            raise ServerLost(f"it serves {', '.join(served) or 'no model'}, not {wanted!r}")
        self._model = wanted or next(iter(served))
        try:
            version = (await self._get_object("/version")).get("version", "")
        except ServerLost:  # not every version has it
            version = ""
        found = _VERSION.match(str(version))
        # An unknown version is taken for a new one.
        self.takes_ids = found is None or tuple(int(n or 0) for n in found.groups()) >= _IDS_SINCE
        return ServerFacts(
            self._model,
            "vllm-server",
            str(version),
            context_tokens=count_of(served[self._model].get("max_model_len")),
        )

    async def _generate(self, job: LaneJob) -> Finish:
        body = request_of(job, self._model, returns_ids=self.takes_ids)
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as limit:
                await self._read_answer(job, body, limit)
        if job.finish is None:
            raise ServerLost("its answer ended early")
        return job.finish

    async def _read_answer(
        self, job: LaneJob, body: dict[str, Any], limit: asyncio.Timeout
    ) -> None:
        async with aclosing(self._events(job, "/v1/completions", body)) as events:
            async for event in events:
                if event.data == _DONE:
                    return
                chunk = decoded(_decoder, event.data)
                usage = chunk.usage
                if chunk.choices and job.finish is None:
                    choice = chunk.choices[0]
                    ids = choice.token_ids
                    if ids is None:
                        made = (usage.completion_tokens or 0) if usage is not None else 0
                        ids = job.unnamed(made - job.completion_tokens)
                    logprobs = _logprobs_of(choice, ids, job.sampling.logprobs)
                    self._deliver(job, Piece(ids, choice.text, logprobs))
                    job.finish = _finish_of(choice)
                    if job.finish is not None:
                        limit.reschedule(asyncio.get_running_loop().time() + USAGE_S)
                elif usage is not None and job.finish is not None:
                    details = usage.prompt_tokens_details
                    cached = None if details is None else details.cached_tokens
                    job.finish = job.finish._replace(cached_tokens=cached or 0)


def request_of(job: LaneJob, model: str, *, returns_ids: bool = True) -> dict[str, Any]:
    sampling = job.sampling
    body: dict[str, Any] = {
        "model": model,
        "prompt": job.token_ids,
        **vllm_sampling(sampling),
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": not returns_ids},
    }
    if returns_ids:
        body["return_token_ids"] = True
    if job.cache_salt:  # its prefix cache is shared among requests of the same one only
        body["cache_salt"] = job.cache_salt
    if sampling.logprobs is not None:
        body |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
    return body


def _finish_of(choice: _Choice) -> Finish | None:
    reason, stopped_by = choice.finish_reason, choice.stop_reason
    if reason is None:
        return None
    if reason == "length":
        return Finish(FinishReason.LENGTH)
    if reason == "stop":
        return Finish(
            FinishReason.STOP,
            stop=stopped_by if isinstance(stopped_by, str) else "",
            stop_token_id=stopped_by if isinstance(stopped_by, int) else None,
        )
    raise JobFailed(Code.ENGINE_ERROR, f"its server ended it: {reason[:64]}")


def _logprobs_of(choice: _Choice, ids: list[int], wanted: int | None) -> list[TokenLogprob] | None:
    told = choice.logprobs
    if wanted is None or not ids:
        return None
    if told is None or len(told.token_logprobs) != len(ids):
        raise JobFailed(Code.ENGINE_ERROR, "its server sent tokens without log-probabilities")
    tops = told.top_logprobs or [None] * len(ids)
    return [
        TokenLogprob(0.0 if logprob is None else logprob, _likeliest(top or {}, wanted))
        for logprob, top in zip(told.token_logprobs, tops, strict=True)
    ]


def _likeliest(top: dict[str, float], wanted: int) -> list[tuple[int, float]]:
    """The ``wanted`` likeliest tokens; the server adds the chosen token, likely or not."""
    pairs = [(int(t.removeprefix(_TOKEN)), v) for t, v in top.items() if t.startswith(_TOKEN)]
    return sorted(pairs, key=lambda pair: -pair[1])[:wanted]
