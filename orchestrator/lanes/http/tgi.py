"""A lane to Hugging Face's text-generation-inference, by ``/generate_stream``.

The server takes no token ids, so prompts are sent as text (``text_only`` says what that loses); its
answers name each token. It leaves stop strings in the text, which is cut here. Closing the
connection drops the request from its batch after the step under way. It has no deadline.
"""

import asyncio
from contextlib import aclosing
from typing import Any, Final

import msgspec

from orchestrator.lanes.cards import ModelFolder, ServerFacts
from orchestrator.lanes.http.http_lane import HttpLane, ServerEvent, count_of, decoded
from orchestrator.lanes.lane_job import Finish, LaneJob, Piece, ServerLost
from orchestrator.lanes.text_only import PromptText, StopCutter
from protocol import Feature, FinishReason, TokenLogprob

MAX_STOPS: Final = 4
"""Stop strings that the server takes unless its operator allows more; the text is cut here at any
number of them."""


class _Token(msgspec.Struct):
    id: int
    text: str = ""
    logprob: float | None = None
    special: bool = False


class _Details(msgspec.Struct):
    finish_reason: str = ""


class _Event(ServerEvent):
    token: _Token | None = None
    top_tokens: list[_Token] = msgspec.field(default_factory=list)
    details: _Details | None = None


_decoder = msgspec.json.Decoder(_Event)


class TgiLane(HttpLane):
    """A lane to one ``text-generation-launcher``."""

    lacks = (
        Feature.IGNORE_EOS,
        Feature.LOGIT_BIAS,
        Feature.MIN_P,
        Feature.MIN_TOKENS,
        Feature.PENALTIES,
        Feature.STOP_TOKEN_IDS,
    )
    abort_ms = 100.0
    slots = 32
    _text: PromptText | None = None

    async def _facts(self, folder: ModelFolder) -> ServerFacts:
        if self._text is None:
            self._text = await asyncio.to_thread(PromptText, folder.tokenizer_json)
        info = await self._get_object("/info")
        return ServerFacts(
            self.endpoint.model or str(info.get("model_id") or "tgi"),
            "tgi",
            str(info.get("version") or ""),
            context_tokens=count_of(info.get("max_total_tokens")),
            quantization=str(info.get("quantize") or ""),
        )

    async def _generate(self, job: LaneJob) -> Finish:
        assert self._text is not None
        prompt = await self._text.prompt_of(job)
        cutter = StopCutter(job.sampling.stop)
        is_silent = job.sampling.skip_special_tokens
        async with aclosing(self._events(job, "/generate_stream", _request(job, prompt))) as events:
            async for event in events:
                one = decoded(_decoder, event.data)
                if one.token is not None:
                    text = "" if one.token.special and is_silent else one.token.text
                    shown = cutter.feed(text)
                    self._deliver(job, Piece([one.token.id], shown, _logprobs(job, one)))
                if cutter.found:
                    return Finish(FinishReason.STOP, stop=cutter.found)
                if one.details is not None:
                    is_length = one.details.finish_reason == "length"
                    reason = FinishReason.LENGTH if is_length else FinishReason.STOP
                    return Finish(reason, tail=cutter.flush())
        raise ServerLost("its answer ended early")


def _request(job: LaneJob, prompt: str) -> dict[str, Any]:
    sampling = job.sampling
    parameters: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "details": True,
        "stop": list(sampling.stop[:MAX_STOPS]),
        "do_sample": sampling.temperature > 0,
    }
    if sampling.temperature > 0:
        parameters["temperature"] = sampling.temperature
        if sampling.top_p < 1:
            parameters["top_p"] = sampling.top_p
        if sampling.top_k > 0:
            parameters["top_k"] = sampling.top_k
        if sampling.seed is not None:
            parameters["seed"] = sampling.seed % 2**64
    if sampling.logprobs:
        parameters["top_n_tokens"] = sampling.logprobs
    return {"inputs": prompt, "parameters": parameters}


def _logprobs(job: LaneJob, event: _Event) -> list[TokenLogprob] | None:
    if job.sampling.logprobs is None or event.token is None:
        return None
    top = [(t.id, t.logprob or 0.0) for t in event.top_tokens[: job.sampling.logprobs]]
    return [TokenLogprob(event.token.logprob or 0.0, top)]
