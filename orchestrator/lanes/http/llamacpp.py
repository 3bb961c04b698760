"""A lane to llama.cpp's own server, by ``/completion``: takes token ids, gives text and most ids.

The server leaves out the ids of tokens that end within a character or within what may be a stop
string, so its card says that it lacks them. ``t_max_predict_ms`` is set to the job's budget: it
counts from the first token on and looks at line ends, so it is a second net and no deadline. The
server notices a closed connection with the next token that it sends; while it computes a prompt it
looks when for a second it has told nobody anything, tokens and counts among it.
"""

import re
from contextlib import aclosing
from typing import Any, Final

import msgspec

from orchestrator.lanes.cards import ModelFolder, ServerFacts
from orchestrator.lanes.http.http_lane import (
    HttpLane,
    ServerEvent,
    count_of,
    decoded,
    jobs_in,
)
from orchestrator.lanes.lane_job import Finish, LaneJob, Piece, ServerLost
from protocol import Feature, FinishReason

COUNT_EVERY_S: Final = 2.5
"""Seconds between questions for its jobs, long enough for it to look at its connections."""
_RUNNING = re.compile(
    rb"^llamacpp:requests_(?:processing|deferred)(?:\{[^}]*\})?\s+([\d.e+]+)", re.MULTILINE
)


class _Event(ServerEvent):
    content: str = ""
    tokens: list[int] = msgspec.field(default_factory=list)
    stop: bool = False
    stop_type: str = ""
    stopping_word: str = ""
    tokens_predicted: int = 0


class _Slot(msgspec.Struct):
    is_processing: bool = False


_NO_PENALTIES = {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_decoder = msgspec.json.Decoder(_Event)
_slots_decoder = msgspec.json.Decoder(list[_Slot])


class LlamaCppLane(HttpLane):
    """A lane to one ``llama-server``."""

    lacks = (Feature.LOGPROBS, Feature.MIN_TOKENS, Feature.SPECIAL_TEXT, Feature.STOP_TOKEN_IDS)
    abort_ms = 300.0
    """Ms until an aborted job's slot is free while it decodes (docs/engines.md has what was
    measured); a second and more while it computes a long prompt."""
    slots = 1
    running = _RUNNING
    _has_metrics = True
    _count_at = 0.0

    async def _facts(self, folder: ModelFolder) -> ServerFacts:
        props = await self._get_object("/props")
        path = str(props.get("model_alias") or props.get("model_path") or "")
        name = self.endpoint.model or path.rpartition("/")[2].removesuffix(".gguf") or "llamacpp"
        settings = props.get("default_generation_settings")
        return ServerFacts(
            name,
            "llamacpp-server",
            str(props.get("build_info") or ""),
            context_tokens=count_of(settings.get("n_ctx")) if isinstance(settings, dict) else 0,
            slots=count_of(props.get("total_slots")),
        )

    async def _poll(self) -> int | None:
        await self._get("/health")
        if self._clock.now() < self._count_at:
            return None
        self._count_at = self._clock.now() + COUNT_EVERY_S
        if self._has_metrics:
            jobs = jobs_in(await self._get_or("/metrics", b""), _RUNNING)
            self._has_metrics = jobs is not None
            return jobs
        try:
            slots = _slots_decoder.decode(await self._get_or("/slots", b"[]"))
        except msgspec.DecodeError:
            return None
        return sum(slot.is_processing for slot in slots) if slots else None

    async def _generate(self, job: LaneJob) -> Finish:
        async with aclosing(self._events(job, "/completion", self._request(job))) as events:
            async for event in events:
                one = decoded(_decoder, event.data)
                # The tokens that the server keeps to itself are counted, not named.
                silent = one.tokens_predicted - job.completion_tokens - len(one.tokens)
                ids = job.unnamed(silent) + one.tokens
                self._deliver(job, Piece(ids, one.content))
                if one.stop:
                    return _finish_of(one)
        raise ServerLost("its answer ended early")

    def _request(self, job: LaneJob) -> dict[str, Any]:
        sampling = job.sampling
        body: dict[str, Any] = {
            "prompt": job.token_ids,
            "n_predict": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": max(0, sampling.top_k),
            "min_p": sampling.min_p,
            "stop": list(sampling.stop),
            "ignore_eos": sampling.ignore_eos,
            "logit_bias": [list(pair) for pair in sampling.logit_bias],
            "t_max_predict_ms": max(1, int(1000 * job.left_s(self._clock.now()))),
            "cache_prompt": True,
            "return_tokens": True,
            "stream": True,
        }
        if sampling.seed is not None:  # the server has 32 bits, the last value means "any"
            body["seed"] = sampling.seed % (2**32 - 1)
        penalties = {
            "repeat_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
        }
        if penalties != _NO_PENALTIES:
            assert self._card is not None
            # The server would look back at its last 64 tokens otherwise, the prompt's among them.
            body |= penalties | {"repeat_last_n": self._card.context_tokens}
        return body


def _finish_of(event: _Event) -> Finish:
    if event.stop_type == "word":
        return Finish(FinishReason.STOP, stop=event.stopping_word)
    return Finish(FinishReason.STOP if event.stop_type == "eos" else FinishReason.LENGTH)
