"""The servers over HTTP, each by its API with the most facts per token: vLLM, llama.cpp and
text-generation-inference, and any other one by OpenAI's. None has a deadline; the lane keeps it.
"""

import re
from typing import Any, Final

import msgspec

from orchestrator.lanes.endpoint import ServerKind
from orchestrator.lanes.servers.cards import ServerFacts, count_of
from orchestrator.lanes.servers.connection import ServerEvent
from orchestrator.lanes.servers.job import Finish, JobFailed, ServerJob, ServerLost
from orchestrator.lanes.servers.lane import ServerLane
from orchestrator.lanes.servers.text import TokenCounter
from protocol import Code, Feature, FinishReason, Sampling, TokenLogprob


def _count_of_jobs(names: bytes) -> re.Pattern[bytes]:
    return re.compile(rb"^" + names + rb"(?:\{[^}]*\})?\s+([\d.e+]+)", re.MULTILINE)


MAX_STOPS: Final = 4
"""Maximum stop strings of OpenAI's API and of TGI by default; this side cuts at any number."""

_OF_FEW = (
    Feature.IGNORE_EOS,
    Feature.LOGIT_BIAS,
    Feature.MIN_P,
    Feature.MIN_TOKENS,
    Feature.PENALTIES,
    Feature.STOP_TOKEN_IDS,
    Feature.TOKEN_IDS,
)
"""Features that neither text-generation-inference nor OpenAI's API has."""

# ── vLLM ─────────────────────────────────────────────────────────────────────────────────────────

_IDS_SINCE: Final = (0, 10, 2)
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")
_TOKEN: Final = "token_id:"
_USUAL = Sampling(max_tokens=1)
_RARE = (
    "min_tokens",
    "ignore_eos",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "skip_special_tokens",
)
"""Parameters that few requests state: they are sent if they differ from the defaults."""


def _stated(sampling: Sampling) -> dict[str, Any]:
    """vLLM's parameters, but for log-probabilities."""
    stated: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
    }
    stated |= {n: v for n in _RARE if (v := getattr(sampling, n)) != getattr(_USUAL, n)}
    if sampling.stop:
        stated["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        stated["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.logit_bias:
        stated["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.seed is not None:  # 64 bits here; vLLM's are signed
        stated["seed"] = (sampling.seed + 2**63) % 2**64 - 2**63
    return stated


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = 0
    prompt_tokens_details: _Cached | None = None


class _Chunk(ServerEvent):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None


class VllmLane(ServerLane):
    """A lane to one ``vllm serve``, by its OpenAI completions: sends token ids, gets ids and text.
    A closed connection aborts the request in vLLM's engine after the current step and the server's
    next loop pass: 27 to 63 ms measured (0.32, a small model on a CPU)."""

    path = "/v1/completions"
    decoder = msgspec.json.Decoder(_Chunk)
    running: re.Pattern[bytes] | None = _count_of_jobs(rb"vllm:num_requests_(?:running|waiting)")
    names_ids = True
    _model = ""

    async def _served(self) -> dict[str, Any]:
        """The server's data on this lane's model. Raises ``ServerLost``."""
        models = (await self.server.get_object("/v1/models")).get("data")
        served = {
            str(one.get("id")): one
            for one in (models if isinstance(models, list) else ())
            if isinstance(one, dict)
        }
        wanted = self.endpoint.model
        if not served or (wanted and wanted not in served):
            raise ServerLost(f"it serves {', '.join(served) or 'no model'}, not {wanted!r}")
        self._model = wanted or next(iter(served))
        return served[self._model]

    async def _facts(self) -> ServerFacts:
        served = await self._served()
        try:
            version = str((await self.server.get_object("/version")).get("version", ""))
        except ServerLost:  # not every version has it
            version = ""
        found = _VERSION.match(version)
        # An unknown version counts as new.
        self.names_ids = found is None or tuple(int(n or 0) for n in found.groups()) >= _IDS_SINCE
        return ServerFacts(
            self._model,
            "vllm-server",
            version,
            lacks=() if self.names_ids else (Feature.TOKEN_IDS,),
            abort_ms=65.0,
            slots=64,  # it takes more and queues them itself
            context_tokens=count_of(served.get("max_model_len")),
        )

    def _request(self, job: ServerJob, prompt: str | list[int]) -> dict[str, Any]:
        counts = {"include_usage": True, "continuous_usage_stats": not self.names_ids}
        body: dict[str, Any] = {"model": self._model, "prompt": prompt, "stream": True}
        body |= _stated(job.sampling) | {"stream_options": counts}
        if self.names_ids:
            body["return_token_ids"] = True
        if job.cache_salt:  # its prefix cache is shared among requests of the same one only
            body["cache_salt"] = job.cache_salt
        if job.sampling.logprobs is not None:
            body |= {"logprobs": job.sampling.logprobs, "return_tokens_as_token_ids": True}
        return body

    def _take(self, job: ServerJob, event: _Chunk) -> bool:
        usage = event.usage
        if event.choices and job.finish is None:
            choice = event.choices[0]
            ids = choice.token_ids
            if ids is None:
                made = (usage.completion_tokens or 0) if usage is not None else 0
                ids = job.unnamed(made - job.completion_tokens)
            logprobs = _logprobs_of(choice, ids, job.sampling.logprobs)
            self._deliver(job, ids, choice.text, logprobs)
            if choice.finish_reason is not None:
                job.finish = _finish_of(choice)
        elif usage is not None and job.finish is not None:
            told = usage.prompt_tokens_details
            cached = 0 if told is None else told.cached_tokens or 0
            job.finish = job.finish._replace(cached_tokens=cached)
        return False  # its usage report follows, or [DONE]


def _finish_of(choice: _Choice) -> Finish:
    reason, by = choice.finish_reason, choice.stop_reason
    if reason == "length":
        return Finish(FinishReason.LENGTH)
    if reason == "stop":
        if isinstance(by, int):
            return Finish(FinishReason.STOP, stop_token_id=by)
        return Finish(FinishReason.STOP, stop=by or "")
    raise JobFailed(Code.ENGINE_ERROR, f"its server ended it: {str(reason)[:64]}")


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
    """The ``wanted`` likeliest tokens; the server adds the chosen token even if it is unlikely."""
    pairs = [(int(t.removeprefix(_TOKEN)), v) for t, v in top.items() if t.startswith(_TOKEN)]
    return sorted(pairs, key=lambda pair: -pair[1])[:wanted]


# ── any other server with OpenAI's API ───────────────────────────────────────────────────────────


class OpenAiLane(VllmLane):
    """A lane to any server with OpenAI's completions: SGLang, Dynamo's frontend and many more. The
    server gets token ids, which OpenAI's API accepts as well as text, and only OpenAI's own
    parameters. It returns text; this lane counts its tokens and cuts it at stop strings."""

    running = None
    names_ids = False
    health = "/v1/models"
    facts_show_health = counts_tokens = leaves_stops = True

    async def _facts(self) -> ServerFacts:
        served = await self._served()
        return ServerFacts(
            self._model,
            "openai-server",
            "",
            lacks=(*_OF_FEW, Feature.LOGPROBS, Feature.SPECIAL_TEXT),
            abort_ms=100.0,
            slots=32,
            context_tokens=count_of(served.get("max_model_len")),
        )

    def _request(self, job: ServerJob, prompt: str | list[int]) -> dict[str, Any]:
        sampling = job.sampling
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stream": True,
        }
        if sampling.top_k > 0:  # not OpenAI's, but its client asked for it
            body["top_k"] = sampling.top_k
        if sampling.stop:
            body["stop"] = list(sampling.stop[:MAX_STOPS])
        if sampling.seed is not None:
            body["seed"] = sampling.seed % 2**63
        return body

    def _take(self, job: ServerJob, event: _Chunk) -> bool:
        if event.choices and job.finish is None:
            choice = event.choices[0]
            if job.counter is None:
                assert self._tokenizer is not None
                job.counter = TokenCounter(self._tokenizer)
            made = job.counter.feed(choice.text)
            self._deliver(job, job.unnamed(made - job.completion_tokens), choice.text)
            if choice.finish_reason is not None:
                job.finish = _finish_of(choice)
        return False  # [DONE] follows


# ── llama.cpp ────────────────────────────────────────────────────────────────────────────────────

COUNT_EVERY_S: Final = 2.5
"""Seconds between queries of its jobs, long enough for it to check its connections."""
_NO_PENALTIES = {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


class _LlamaEvent(ServerEvent):
    content: str = ""
    tokens: list[int] = msgspec.field(default_factory=list)
    stop: bool = False
    stop_type: str = ""
    stopping_word: str = ""
    tokens_predicted: int = 0


class LlamaCppLane(ServerLane):
    """A lane to one ``llama-server``, by ``/completion``: sends token ids, gets text and most ids.
    The server leaves out the ids of tokens that end within a character or a possible stop string,
    so its card lists them as lacking. ``t_max_predict_ms`` is set to the job's budget: it counts
    from the first token and is checked at line ends, so it is a fallback and not a deadline. The
    server notices a closed connection at its next sent token (measurements: docs/engines.md); while
    it computes a prompt it checks only after a second without output."""

    path = "/completion"
    decoder = msgspec.json.Decoder(_LlamaEvent)
    running = _count_of_jobs(rb"llamacpp:requests_(?:processing|deferred)")
    count_every_s = COUNT_EVERY_S

    async def _facts(self) -> ServerFacts:
        props = await self.server.get_object("/props")
        path = str(props.get("model_alias") or props.get("model_path") or "")
        settings = props.get("default_generation_settings")
        return ServerFacts(
            self.endpoint.model or path.rpartition("/")[2].removesuffix(".gguf") or "llamacpp",
            "llamacpp-server",
            str(props.get("build_info") or ""),
            lacks=(
                Feature.LOGPROBS,
                Feature.MIN_TOKENS,
                Feature.SPECIAL_TEXT,
                Feature.STOP_TOKEN_IDS,
                Feature.TOKEN_IDS,
            ),
            abort_ms=300.0,
            slots=count_of(props.get("total_slots")) or 1,
            context_tokens=count_of(settings.get("n_ctx")) if isinstance(settings, dict) else 0,
        )

    def _request(self, job: ServerJob, prompt: str | list[int]) -> dict[str, Any]:
        sampling = job.sampling
        body: dict[str, Any] = {
            "prompt": prompt,
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
            # Otherwise the server would use its last 64 tokens, including the prompt's.
            body |= penalties | {"repeat_last_n": self._card.context_tokens}
        return body

    def _take(self, job: ServerJob, event: _LlamaEvent) -> bool:
        # Tokens without ids are only counted.
        silent = event.tokens_predicted - job.completion_tokens - len(event.tokens)
        self._deliver(job, job.unnamed(silent) + event.tokens, event.content)
        if event.stop:
            is_stop = event.stop_type in ("word", "eos")
            reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
            word = event.stopping_word if event.stop_type == "word" else ""
            job.finish = Finish(reason, stop=word)
        return event.stop


# ── text-generation-inference ────────────────────────────────────────────────────────────────────


class _Token(msgspec.Struct):
    id: int
    text: str = ""
    logprob: float | None = None
    special: bool = False


class _Details(msgspec.Struct):
    finish_reason: str = ""


class _TgiEvent(ServerEvent):
    token: _Token | None = None
    top_tokens: list[_Token] = msgspec.field(default_factory=list)
    details: _Details | None = None


class TgiLane(ServerLane):
    """A lane to one ``text-generation-launcher``, by ``/generate_stream``: sends text, gets ids.
    The server leaves stop strings in the text. A closed connection drops the request from its batch
    after the current step."""

    path = "/generate_stream"
    decoder = msgspec.json.Decoder(_TgiEvent)
    takes_text = leaves_stops = True

    async def _facts(self) -> ServerFacts:
        info = await self.server.get_object("/info")
        return ServerFacts(
            self.endpoint.model or str(info.get("model_id") or "tgi"),
            "tgi",
            str(info.get("version") or ""),
            lacks=_OF_FEW,
            abort_ms=100.0,
            slots=32,
            context_tokens=count_of(info.get("max_total_tokens")),
            quantization=str(info.get("quantize") or ""),
        )

    def _request(self, job: ServerJob, prompt: str | list[int]) -> dict[str, Any]:
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

    def _take(self, job: ServerJob, event: _TgiEvent) -> bool:
        token, wanted = event.token, job.sampling.logprobs
        if token is not None:
            is_silent = token.special and job.sampling.skip_special_tokens
            logprobs = None
            if wanted is not None:
                top = [(t.id, t.logprob or 0.0) for t in event.top_tokens[:wanted]]
                logprobs = [TokenLogprob(token.logprob or 0.0, top)]
            self._deliver(job, [token.id], "" if is_silent else token.text, logprobs)
        if event.details is not None:
            is_length = event.details.finish_reason == "length"
            job.finish = Finish(FinishReason.LENGTH if is_length else FinishReason.STOP)
        return event.details is not None


HTTP_LANES: Final[dict[ServerKind, type[ServerLane]]] = {
    ServerKind.VLLM: VllmLane,
    ServerKind.LLAMACPP: LlamaCppLane,
    ServerKind.TGI: TgiLane,
    ServerKind.OPENAI: OpenAiLane,
}
