"""Fields of generation requests with the same meaning in every dialect (OR-2, DL-1)."""

import re
from collections.abc import Callable, Mapping, MutableSequence
from operator import not_
from typing import Annotated, Any, ClassVar, Final, NamedTuple

import msgspec
from aiohttp import web

from orchestrator.api.http.context import (
    CONTEXT,
    NAME,
    NAME_RULE,
    ORCHESTRATOR,
    Context,
    served_name,
    trace_of,
)
from orchestrator.api.http.deadlines import TTFT_TARGETS, Headers, read_deadline, read_parts
from orchestrator.api.http.field_errors import must, wrong
from orchestrator.api.http.ignored import pass_over
from orchestrator.errors import InvalidRequest
from orchestrator.instances.candidate import read_capability
from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.job import (
    IDLE_KEEP_S,
    MAX_IDLE_KEEP_S,
    Api,
    Job,
    OnDisconnect,
    PlacementConstraint,
    PlacementMode,
    Priority,
    Prompt,
    TellTime,
)
from orchestrator.tasks.runs import MAX_CALLS_LEFT
from protocol import (
    MAX_LOGIT_BIASES,
    Feature,
    Grammar,
    InvalidSampling,
    OnDeadline,
    Sampling,
    read_logit_bias,
    stated_of,
    unstated_of,
)

MAX_INSTANCES = 64
MAX_INSTANCE_CHARS = 256
"""Most characters of an instance's name. A host name has at most 253. The task keeps the names."""
SESSION_HEADER = "X-Session-Id"
SESSIONS_OF_OTHERS = ("x-dynamo-session-id", "x-claude-code-session-id")
"""Headers in which agents send the id of their conversation by default."""
PRIORITY_OF_DYNAMO = "x-dynamo-request-priority"
"""Header with a whole number. Higher numbers are more urgent."""
KEEPS_ON = "x-request-disconnect-disabled"
"""Ray Serve's header. ``?1`` continues the request after its client disconnects."""
HEARD_OF_DYNAMO = frozenset((*TTFT_TARGETS, *SESSIONS_OF_OTHERS, PRIORITY_OF_DYNAMO))
FLEX = "flex"
"""OpenAI's ``service_tier`` for work that can wait."""
BATCH_OBJECTIVE: Final = "batch"
"""Gateway objective of batch requests."""
OBJECTIVE_HEADERS = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
FAIRNESS_HEADERS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
"""Headers of llm-d's router: its own, and the older one of the Gateway API Inference Extension."""
NO_FAIRNESS_ID = "default-flow"
"""Fairness id that llm-d's router gives to requests without one."""
CALLS_LEFT_HEADER = "X-Chain-Calls-Left"
NULL = msgspec.Raw(b"null")
Unused = msgspec.Raw
"""Type of accepted fields that have no effect. They stay raw: decoding them could take long."""
_MAX_LOOKED_AT = 256
"""Most bytes of a field that is decoded to check its value. All supported values are shorter."""
_CAPABILITY = r"^([0-9]{1,3}\.[0-9]{1,3})?$"
"""A version such as 9.0."""
_AboveZero = Annotated[float, msgspec.Meta(gt=0)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Names = Annotated[
    list[Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_INSTANCE_CHARS)]],
    msgspec.Meta(max_length=MAX_INSTANCES),
]
_COUNT = re.compile(r"\d{1,6}", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d{1,10}", re.ASCII)
_bias_decoder = msgspec.json.Decoder(dict[str, float] | None)
_MAX_BIAS_BYTES = 64 * 1024
"""Most bytes of ``logit_bias``. All allowed entries fit. Larger ones would take long to decode."""


class PlacementBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Placement of a task. ``/v2/instances`` lists the ``instances`` and their capabilities. All
    fields are our own, so unknown ones are an error in every dialect."""

    has_fields_of_ours: ClassVar[bool] = True

    mode: PlacementMode = PlacementMode.AUTO
    instances: _Names = []
    quantization: _Names = []
    min_vram_gib: Annotated[float, msgspec.Meta(ge=0, lt=2**20)] = 0.0
    min_compute_capability: Annotated[str, msgspec.Meta(pattern=_CAPABILITY)] = ""
    capabilities: list[Feature] = []


class ServedValues(NamedTuple):
    otherwise: str
    """Advice for a client that sent an unsupported value."""
    fits: Callable[[Any], bool] = not_
    """Whether a value is supported. The default: only values without content are."""
    is_hint: bool = False
    """Whether the answer is as good without the field, so that tolerant reading ignores it."""


class StatedGrammar(NamedTuple):
    """The grammar that the answer must match, and its field in the request."""

    field: str
    grammar: Grammar


class GenerationRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The base class of every dialect's body. Each dialect adds its prompt and other fields."""

    default_max_tokens: ClassVar[int | None] = None
    """The API's default for ``max_tokens``; None: the operator's default."""
    cuts_max_tokens: ClassVar[bool] = False
    """Whether a ``max_tokens`` that exceeds the context is reduced to fit. For APIs that require
    the field: their clients send the maximum of their own model."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: msgspec.Raw = NULL

    deadline_ms: float | None = None
    first_token_ms: _AboveZero | None = None
    token_gap_ms: _AboveZero | None = None
    on_deadline: OnDeadline = OnDeadline.ERROR
    on_disconnect: OnDisconnect = OnDisconnect.CANCEL
    priority: Priority | int | None = None
    tenant: str | None = None
    session_id: str | None = None
    idle_keep_s: float | None = None
    calls_left: int | None = None
    max_run_tokens: Annotated[int, msgspec.Meta(gt=0)] | None = None
    max_run_cost: _AboveZero | None = None
    tell_time: bool | None = None
    wind_down: _Share | None = None
    tools_until: _Share | None = None
    placement: PlacementBody | None = None

    def prompt_of(self) -> Prompt:
        """The prompt to generate from. Raises ``InvalidRequest`` if it is not supported."""
        raise NotImplementedError

    def token_limit(self) -> int | None:
        """The most tokens to generate; None: the default."""
        return self.max_tokens

    def wanted_logprobs(self) -> int | None:
        """Alternatives per token to return log-probabilities for; None: no log-probabilities."""
        return None

    def own_sampling(self) -> Mapping[str, Any]:
        """Fields of ``Sampling`` that exist only in this dialect."""
        return {}

    def stated_grammar(self) -> StatedGrammar | None:
        """The grammar that the answer must match. Raises ``InvalidRequest``."""
        return None

    def wants_one_piece(self) -> bool:
        return not getattr(self, "stream", None)

    def is_awaited(self) -> bool:
        """Whether the answer is useless after the client disconnects."""
        return self.on_disconnect is OnDisconnect.CANCEL

    def hinted_priority(self) -> int | None:
        """Dynamo's priority in the body; higher is more urgent. None if it is not set."""
        return None

    def stated_tier(self) -> str | None:
        """The API's own equivalent of ``priority``; None if it is not set."""
        return None

    def field_names(self) -> Mapping[str, str]:
        """The client's names for fields with another name here, for error messages."""
        return {}


class OtherFormsRequest(GenerationRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The base class of bodies with their own fields for the answer's format. The chat fields of
    OpenAI and vLLM are refused: if they were ignored, the answer would have the wrong format."""

    guided_choice: Unused = NULL
    guided_grammar: Unused = NULL
    guided_json: Unused = NULL
    guided_regex: Unused = NULL
    n: Unused = NULL
    response_format: Unused = NULL
    structured_outputs: Unused = NULL


def other_forms(own: str) -> dict[str, ServedValues]:
    """Fields that are refused in favor of ``own``, and fields with only one supported value."""
    forms = [one for one in OtherFormsRequest.__struct_fields__ if one.startswith("guided_")]
    return {
        **dict.fromkeys(
            [*forms, "response_format", "structured_outputs"], ServedValues(f"send {own}")
        ),
        "n": ServedValues("send one request for each answer", lambda value: value == 1),
    }


def read_limit(query: Mapping[str, str], usual: int, most: int) -> int:
    """The query's ``limit`` for the entries of a list. Raises ``InvalidRequest``."""
    text = query.get("limit", str(usual))
    limit = int(text) if text.isascii() and text.isdigit() and len(text) <= 6 else 0
    if not 1 <= limit <= most:
        raise must("limit", f"be a whole number from 1 to {most}, got {text[:64]!r}")
    return limit


def read_headers_deadline(request: web.Request) -> Deadline:
    """The deadline in the headers for an answer in one piece. Becomes the request's deadline.
    Raises ``InvalidRequest``."""
    context, policy = request[CONTEXT], request.app[ORCHESTRATOR].deadlines
    arrival, ignored = context.arrival, context.ignored_headers
    context.deadline = read_deadline(
        request.headers, None, arrival, policy, in_one_piece=True, ignored=ignored
    )
    return context.deadline


def read_job(
    request: web.Request, body: GenerationRequest, api: Api, *, keep: bool
) -> tuple[Job, Prompt]:
    """The job and prompt of a request. Raises ``InvalidRequest``; ``Forbidden`` for the tenant."""
    return read_job_of(request, body, api, keep=keep), body.prompt_of()


def read_job_of(request: web.Request, body: GenerationRequest, api: Api, *, keep: bool) -> Job:
    """The job of a request, without its prompt. Raises the same errors as ``read_job``."""
    context, headers = request[CONTEXT], request.headers
    context.field_names = body.field_names()
    stated, grammar = body.stated_grammar(), None
    if stated is not None:
        context.field_names = {**context.field_names, "grammar": stated.field}
        grammar = stated.grammar
        context.grammars = (grammar,)
    keeps_on = headers.get(KEEPS_ON) == "?1"
    context.deadline = deadline = read_deadline(
        headers,
        body.deadline_ms,
        context.arrival,
        request.app[ORCHESTRATOR].deadlines,
        is_awaited=body.is_awaited() and not keeps_on,
        in_one_piece=body.wants_one_piece(),
        ignored=context.ignored_headers,
    )
    of_dynamo = {name for name in map(str.lower, headers) if name.startswith("x-dynamo-")}
    context.ignored_headers += sorted(of_dynamo - HEARD_OF_DYNAMO)
    max_tokens = body.token_limit()
    session_id = _session_id(headers, body, context)
    job = Job(
        api=api,
        model=served_name(request, body.model),
        sampling=Sampling(
            max_tokens=max_tokens or 0,
            min_tokens=body.min_tokens or 0,
            seed=body.seed,
            stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
            ignore_eos=bool(body.ignore_eos),
            logprobs=body.wanted_logprobs(),
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=_logit_bias(body.logit_bias),
            **body.own_sampling(),
            **stated_of(body),
        ),
        unstated=unstated_of(body),
        max_tokens=max_tokens,
        default_max_tokens=body.default_max_tokens,
        cuts_max_tokens=body.cuts_max_tokens,
        deadline=deadline,
        correlation_id=context.correlation_id,
        request_id=context.request_id,
        arrived=context.arrival.mono,
        parts=read_parts(
            headers,
            body.first_token_ms,
            body.token_gap_ms,
            context.arrival,
            context.ignored_headers,
        ),
        on_deadline=body.on_deadline,
        on_disconnect=OnDisconnect.CONTINUE if keeps_on else body.on_disconnect,
        keep=keep,
        key=context.key.fingerprint,
        priority=class_of(headers, body, context.ignored_headers),
        tenant=_tenant(headers, body.tenant, context),
        session_id=session_id,
        calls_left=_calls_left(headers, body.calls_left),
        max_run_tokens=body.max_run_tokens or 0,
        max_run_cost=body.max_run_cost or 0.0,
        tell_time=_tell_time(body, context),
        states_idle_keep=body.idle_keep_s is not None,
        idle_keep_s=_idle_keep_s(body, session_id),
        placement=PlacementConstraint() if body.placement is None else _placement(body.placement),
        grammar=grammar,
        trace=trace_of(request),
    )
    return job if context.adapt is None else context.adapt(job)


def one_limit(field: str, stated: int | None, max_tokens: int | None) -> int | None:
    """``stated``, the value of an API's ``field``, or ``max_tokens``. Raises ``InvalidRequest``."""
    if stated is None:
        return max_tokens
    if max_tokens not in (None, stated):
        refusal = InvalidRequest(f"max_tokens and {field} differ; send one of them", field=field)
        pass_over("", "max_tokens", refusal)
    return stated


def refuse_unserved(body: msgspec.Struct, served: Mapping[str, ServedValues]) -> None:
    """Raise ``InvalidRequest`` for the first field with a value that is not ``served``."""
    for field, (otherwise, fits, is_hint) in served.items():
        value = getattr(body, field, None)
        if isinstance(value, msgspec.Raw):
            is_short = len(memoryview(value)) <= _MAX_LOOKED_AT
            try:
                value = msgspec.json.decode(value) if is_short else ...
            except msgspec.DecodeError:  # a number out of range, half a surrogate pair
                value = ...
        if value is not None and not fits(value):
            refusal = InvalidRequest(f"{field} is not supported here: {otherwise}", field=field)
            if not is_hint:
                raise refusal
            pass_over("", field, refusal)


def class_of(headers: Headers, body: GenerationRequest, ignored: MutableSequence[str]) -> Priority:
    """The priority class of a request. Sources in order of precedence: ``priority``, the API's own
    equivalent, Dynamo's hint (header before body), a gateway's objective. vLLM's priority is an
    integer: above 0 is batch work. For Dynamo's integer, below 0 is batch work."""
    if isinstance(body.priority, Priority):
        return body.priority
    if body.priority is not None:
        return Priority.BATCH if body.priority > 0 else Priority.INTERACTIVE
    tier = body.stated_tier()
    if tier is not None:
        return Priority.BATCH if tier == FLEX else Priority.INTERACTIVE
    named, hint = headers.get(PRIORITY_OF_DYNAMO), body.hinted_priority()
    if named is not None and _WHOLE.fullmatch(named.strip()):
        hint = int(named)
    elif named is not None:
        ignored.append(PRIORITY_OF_DYNAMO)
    if hint is not None:
        return Priority.BATCH if hint < 0 else Priority.INTERACTIVE
    objectives = (headers.get(name) for name in OBJECTIVE_HEADERS)
    return Priority.BATCH if BATCH_OBJECTIVE in objectives else Priority.INTERACTIVE


def _tenant(headers: Headers, stated: str | None, context: Context) -> str:
    """The tenant of a request. A gateway's header counts only if the key may name tenants.
    Otherwise it is ignored, because any client can send the header."""
    key = context.key
    if stated is not None:
        return key.tenant_for(_name("tenant", stated))
    for header in FAIRNESS_HEADERS:
        named = headers.get(header, "").strip()
        if named in ("", NO_FAIRNESS_ID):
            continue
        if NAME.fullmatch(named) and (key.names_tenants or named == key.tenant):
            return named
        context.ignored_headers.append(header)
    return key.tenant


def _name(field: str, value: str) -> str:
    if not NAME.fullmatch(value):
        raise must(field, NAME_RULE)
    return value


def _calls_left(headers: Mapping[str, str], stated: int | None) -> int | None:
    """Number of calls that the run makes after this one, from the body or a header."""
    field = "calls_left"
    if stated is None:
        named = headers.get(CALLS_LEFT_HEADER)
        if named is None:
            return None
        field, stated = CALLS_LEFT_HEADER, int(named) if _COUNT.fullmatch(named.strip()) else -1
    if not 0 <= stated <= MAX_CALLS_LEFT:
        raise must(
            field,
            f"be a whole number from 0 to {MAX_CALLS_LEFT}: the number of calls that this run makes"
            " after this one",
        )
    return stated


def _tell_time(body: GenerationRequest, context: Context) -> TellTime | None:
    """How to tell the model the time left: from the body, or the key's default; None: not told."""
    is_asked = body.tell_time or body.wind_down is not None or body.tools_until is not None
    if body.tell_time is False or not (is_asked or context.key.tells_time):
        return None
    wind_down = TellTime().wind_down if body.wind_down is None else body.wind_down
    return TellTime(wind_down, body.tools_until or 0.0, is_asked=bool(is_asked))


def _session_id(headers: Headers, body: GenerationRequest, context: Context) -> str:
    """Id of the conversation: from the body, else from our header, else from an agent's header if
    its value is a valid id. Clients that cannot add a field use the header."""
    stated, named = body.session_id, headers.get(SESSION_HEADER)
    if stated is not None:
        if named not in (None, stated):
            raise InvalidRequest(
                f"session_id and {SESSION_HEADER} name two different conversations; send one of "
                "them",
                field="session_id",
            )
        return _name("session_id", stated)
    if named is not None:
        return _name(SESSION_HEADER, named)
    for header in SESSIONS_OF_OTHERS:
        theirs = headers.get(header, "")
        if NAME.fullmatch(theirs):
            return theirs
        if theirs:
            context.ignored_headers.append(header)
    return ""


def _idle_keep_s(body: GenerationRequest, session_id: str) -> float:
    """Seconds to keep the conversation's KV for its next turn."""
    stated = body.idle_keep_s
    if stated is None:
        return IDLE_KEEP_S if session_id else 0.0
    if not session_id:
        raise InvalidRequest(
            f"idle_keep_s keeps the KV of a conversation; send its session_id (or {SESSION_HEADER})"
            " too",
            field="idle_keep_s",
        )
    return read_idle_keep_s(stated)


def read_idle_keep_s(stated: float) -> float:
    """Check that ``stated``, in seconds, is within the limits. Raises ``InvalidRequest``."""
    if not 0 <= stated <= MAX_IDLE_KEEP_S:
        raise must("idle_keep_s", f"be 0 to {MAX_IDLE_KEEP_S:g} seconds, got {stated:g}")
    return stated


def _logit_bias(stated: msgspec.Raw) -> tuple[tuple[int, float], ...]:
    if len(memoryview(stated)) > _MAX_BIAS_BYTES:
        raise must("logit_bias", f"have at most {MAX_LOGIT_BIASES} tokens")
    try:
        return read_logit_bias(_bias_decoder.decode(stated))
    except msgspec.ValidationError as error:
        raise wrong("logit_bias", str(error).partition(" - at ")[0]) from None
    except InvalidSampling as error:
        raise InvalidRequest(str(error), field=error.field) from None


def _placement(body: PlacementBody) -> PlacementConstraint:
    if body.mode is PlacementMode.AUTO and body.instances:
        raise InvalidRequest(
            "placement.instances needs a placement.mode: pin, prefer or avoid",
            field="placement.mode",
        )
    if body.mode is not PlacementMode.AUTO and not body.instances:
        raise InvalidRequest(
            f"placement.mode {body.mode} needs 1 to {MAX_INSTANCES} placement.instances",
            field="placement.instances",
        )
    return PlacementConstraint(
        body.mode,
        tuple(body.instances),
        quantization=tuple(body.quantization),
        vram_bytes=int(body.min_vram_gib * 2**30),
        compute_capability=read_capability(body.min_compute_capability),
        capabilities=frozenset(body.capabilities),
    )
