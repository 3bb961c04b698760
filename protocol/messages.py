"""The messages of a lane, in both directions.

A lane is one long-lived ``ModelStreamInfer`` call. Each message to the worker is one Triton
request on that stream; the request that carried ``Open`` is answered with frames for as long as
the lane lives::

    orchestrator                              worker
      Open ───────────────────────────────────▶ lane opens
      ◀───────────────────────────── Frame(card, stats)
      Submit(handle=7) ───────────────────────▶ job runs
      ◀──────────────── Frame(started, deltas, ends, …)   one per engine step, all jobs of the lane
      Pause(handle=7) ────────────────────────▶ stops after the current step
      ◀──────────────────────────── Frame(paused=[7])
      Resume(handle=7) ───────────────────────▶ resumes, before any that waits
      ◀──────────────────────────── Frame(resumed=[7])
      Cancel(handles=[7]) ────────────────────▶ stops within one step
      ◀──────────────────────────── Frame(ends=[End(7)])

``handle`` is chosen by the orchestrator and unique within its lane. Every submitted handle is
answered by exactly one ``End``; nothing follows it. An empty frame is a heartbeat.

Access: ``Open``, ``Drain`` and ``Swap`` carry the worker's lane token where it has one. The others
name a lane, which only its opener can: the name is random, and never sent elsewhere.

Times are milliseconds. Budgets are relative to receipt: clocks need not agree (DL-2).
Frames are arrays rather than maps on the wire, since they are the hot path; fields are only ever
appended, with a default.
"""

from array import array
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from protocol.card import ModelCard
from protocol.grammar import Grammar
from protocol.outcomes import AbortCause, Code, FinishReason, OnDeadline
from protocol.sampling import Sampling

PROTOCOL_VERSION = 4
NO_TOKEN_ID = -1
"""Id of a token whose id is unknown, from engines that answer with text alone. Tidegate's own
worker never sends it."""


# ── to the worker ────────────────────────────────────────────────────────────────────────────


class Open(msgspec.Struct, tag="open", frozen=True, omit_defaults=True):
    """Opens a lane. ``lane`` is a name that no other open lane has (a random UUID)."""

    version: int
    lane: str
    token: str = ""


class Submit(msgspec.Struct, tag="submit", frozen=True, omit_defaults=True):
    """Starts a job on an open lane.

    ``budget_ms`` is what remains of the deadline when the message leaves; ``deadline_unix_ms`` is
    the original absolute one and serves logs only. Jobs share cached prefixes only with jobs of the
    same ``cache_salt`` (a tenant, where tenants are isolated). ``session`` names the conversation,
    if any, whose KV is kept on disk, and for ``session_keep_ms`` after the job also in memory, as
    long as no running job needs the blocks. ``first_token_budget_ms`` is the time left until the
    first token is due, ``token_gap_ms`` the longest wanted between two, ``share_ms`` this job's
    part of the budget where other jobs must follow within it; they order and size the work and end
    no job (DL-14). A job that ``keeps_on`` is not stopped before its deadline, however certain it
    is to miss (DL-17). ``grammar`` is what the text must match, only for workers with ``grammars``
    on their card; ``adapter`` names a LoRA adapter of the card's ``adapters``.

    The last ``begun_tokens`` of ``token_ids`` were generated already, by the worker that had the
    job before: they count for grammar, penalties and stop strings, and their text is not sent
    again. ``max_tokens`` and ``min_tokens`` are what is left of the job's; stop strings count in
    the text after the first ``stop_after_tokens`` generated. A complete text may be sent too, to
    get its end, with ``max_tokens`` 0 if it has its full length. Only for workers with
    ``can_continue``; others use it for the grammar alone.

    ``serving`` is that of the card whose tokenizer made the ``token_ids``: a worker that serves
    another model by now hands the job back.

    ``expected_tokens`` is a number of tokens that the job will hardly exceed, 0 where unknown: it
    decides how much others' prompts may slow the job down, and never ends it.

    ``images`` are the prompt's in order, each a PNG, JPEG, GIF or WebP file. ``token_ids`` have the
    card's ``Vision.token_id`` for them, as often as ``Vision.tokens_of`` says. Only for workers
    with a ``vision``.
    """

    lane: str
    handle: int
    token_ids: list[int]
    sampling: Sampling
    budget_ms: float
    deadline_unix_ms: int | None = None
    on_deadline: OnDeadline = OnDeadline.ERROR
    correlation_id: str = ""
    cache_salt: str = ""
    session: str = ""
    first_token_budget_ms: float | None = None
    token_gap_ms: float | None = None
    keeps_on: bool = False
    grammar: Grammar | None = None
    begun_tokens: int = 0
    session_keep_ms: float = 0.0
    share_ms: float | None = None
    stop_after_tokens: int = 0
    serving: int = 0
    expected_tokens: int = 0
    images: list[bytes] = []
    adapter: str = ""

    @property
    def begun(self) -> list[int]:
        """Token ids that were generated already."""
        return self.token_ids[len(self.token_ids) - self.begun_tokens :]


class Cancel(msgspec.Struct, tag="cancel", frozen=True, omit_defaults=True):
    """Stops jobs. Unknown and finished handles are ignored: cancelling is idempotent.

    One message serves all jobs that end at the same instant: each message takes the worker's
    interpreter from the engine, which computes the others' tokens.
    """

    lane: str
    handles: list[int]
    cause: AbortCause = AbortCause.CANCEL


class Pause(msgspec.Struct, tag="pause", frozen=True):
    """Pauses a job and keeps its KV; a job that has not started stays unstarted.

    Deadline and cancel count as before. Unknown and finished handles are ignored, and so is a job
    that is paused already. Only for workers with ``can_pause``.
    """

    lane: str
    handle: int


class Resume(msgspec.Struct, tag="resume", frozen=True):
    """Resumes a paused job, before any that waits to start. Otherwise ignored.

    A pause that has not taken effect yet is taken back, and neither is reported.
    """

    lane: str
    handle: int


class Drain(msgspec.Struct, tag="drain", frozen=True, omit_defaults=True):
    """Refuses new work, lets jobs finish for ``grace_ms``, ends the rest, closes all lanes.

    Needs no lane: a launcher sends it before it stops a worker, because an open lane keeps Triton
    from stopping. A worker that is not stopped then takes work again after ``drain.HOLD_S``.
    """

    grace_ms: float
    token: str = ""


class Describe(msgspec.Struct, tag="describe", frozen=True):
    """Asks for the card and a full cache report in the lane's next frame."""

    lane: str


class Swap(msgspec.Struct, tag="swap", frozen=True, omit_defaults=True):
    """Has the worker serve another model, in the same process.

    ``settings`` are worker settings by their dotted names (``model_path``, ``kv.blocks``), as text
    in the form of ``TIDEGATE_WORKER__…``; all others are those that it was started with.
    ``model_name`` alone names one of its card's ``loadable``; no settings at all means the model
    served before this one. ``anew``: load the current model again from its files, whatever
    ``settings`` say. Running jobs have ``grace_ms``, as in a drain. Answered on its own stream: a
    frame with a ``SwapReport`` for each phase, the last one final. Needs no lane. One at a time.
    """

    settings: dict[str, str]
    grace_ms: float = 0.0
    token: str = ""
    anew: bool = False


LaneMessage = Open | Submit | Cancel | Pause | Resume | Drain | Describe | Swap


# ── from the worker ──────────────────────────────────────────────────────────────────────────


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True):
    """Natural-log probability of the chosen token, and the most likely ``(id, logprob)``.

    ``rank`` is how many tokens are at least as likely as the chosen one, itself among them; 0 from
    a worker that does not count them.
    """

    logprob: float
    top: list[tuple[int, float]] = []
    rank: int = 0


class PromptLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities of a prompt's tokens from position ``first`` (1 or more) on, packed.

    Numbers of 4 bytes, since a long prompt has many (little-endian, as on all platforms of
    Triton's): ``logprobs`` (float) and ``ranks`` (int) of each token, ``top_ids`` (int) and
    ``top_logprobs`` (float) of the ``top`` likeliest at its place. Their meaning is that of
    ``TokenLogprob``'s fields.
    """

    first: int
    top: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes

    @classmethod
    def pack(cls, first: int, entries: Sequence[TokenLogprob]) -> "PromptLogprobs":
        """Pack ``entries``, which must have equally many likeliest tokens each."""
        top = [one for entry in entries for one in entry.top]
        return cls(
            first,
            len(top) // max(1, len(entries)),
            _packed("f", [entry.logprob for entry in entries]),
            _packed("i", [entry.rank for entry in entries]),
            _packed("i", [token_id for token_id, _ in top]),
            _packed("f", [logprob for _, logprob in top]),
        )

    def __len__(self) -> int:
        """Number of tokens whose log-probabilities it has."""
        return len(self.ranks) // 4

    @property
    def kept_bytes(self) -> int:
        """Approximate bytes that it takes in memory."""
        return 400 + (8 + 8 * self.top) * len(self)

    def unpack(self) -> list[TokenLogprob]:
        """The log-probabilities as one ``TokenLogprob`` for each token."""
        logprobs, ranks = array("f", self.logprobs), array("i", self.ranks)
        ids, values = array("i", self.top_ids), array("f", self.top_logprobs)
        k = self.top
        return [
            TokenLogprob(
                logprobs[i],
                list(zip(ids[i * k : i * k + k], values[i * k : i * k + k], strict=True)),
                ranks[i],
            )
            for i in range(len(self))
        ]


def _packed(code: str, values: Sequence[float]) -> bytes:
    return array(code, values).tobytes()


class Started(msgspec.Struct, array_like=True, frozen=True):
    """The job left the worker's queue, after ``wait_ms`` in it."""

    handle: int
    wait_ms: float


class Delta(msgspec.Struct, array_like=True):
    """New tokens of a job. ``texts[i]`` is the text that ``ids[i]`` completed.

    A text is empty while a multi-byte character or a possible stop string is incomplete, so
    texts joined are always valid UTF-8. ``logprobs`` is parallel to ``ids`` when asked for.
    """

    handle: int
    ids: list[int]
    texts: list[str]
    logprobs: list[TokenLogprob] | None = None

    def extend(self, later: "Delta") -> None:
        """Take in the same job's next tokens."""
        self.ids.extend(later.ids)
        self.texts.extend(later.texts)
        if self.logprobs is not None and later.logprobs is not None:
            self.logprobs.extend(later.logprobs)


class End(msgspec.Struct, array_like=True, frozen=True):
    """The one terminal record of a job. ``code`` and ``message`` are set unless it ended well.

    ``late_tokens`` were generated after the deadline or abort (waste, counted separately by DL-10).
    ``left_ms`` is the budget left (negative when overrun). ``abort_ms`` is the time from the
    worker's notice of the abort to its slot and blocks being free (WP-5); None if not aborted.
    ``tail`` is text that was held back (a possible stop string, half a character) and belongs after
    the last delta's. ``cached_tokens`` is how much of the prompt was found in the prefix cache and
    not computed again. A ``spared`` job was certain to miss at some point, and continued because it
    ``keeps_on``. ``stop`` is the stop string that ended the text, empty where none did, and
    ``stop_token_id`` the job's own stop token that did.
    """

    handle: int
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int = 0
    wait_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    left_ms: float = 0.0
    code: Code | None = None
    message: str = ""
    late_tokens: int = 0
    abort_ms: float | None = None
    tail: str = ""
    cached_tokens: int = 0
    spared: bool = False
    stop: str = ""
    stop_token_id: int | None = None


CERTAIN_AFTER_STEPS = 64
"""Steps before the fastest of them bounds anything, here and in a worker: ignorance refuses nobody.
A time that beats what would have been certain starts the count again: the machine was busy until
then."""
CERTAIN_SHARE = 0.8
"""Share of the fastest step ever seen that is certain: less than the machine has ever needed."""


class WorkerStats(msgspec.Struct, array_like=True, frozen=True):
    """State of a worker at the time of the frame. Totals count since the worker started.

    ``step_ms`` is a moving average over steps that decoded. ``check_us`` is the sampled cost per
    request of looking at deadline and abort (DL-13). ``busy_ms_total`` is the time spent in
    ``steps_total`` steps, ``prompt_busy_ms_total`` that in the ``prompt_steps_total`` with prompt
    tokens, ``prefill_tokens_total`` the prompt tokens that they computed,
    ``cached_tokens_total`` those that the prefix cache spared them. Of the free blocks,
    ``kv_blocks_cached`` hold a prefix that may be used again, and are evicted on demand.
    ``hit_blocks_total`` and ``missed_blocks_total`` are the full blocks of admitted prompts that
    the prefix cache did and did not hold. ``disk_…`` are those of the tier below it: ``failures``
    are files that could not be written or used. ``stream_utilization`` is the share of time in
    which the GPU computed a step, sampled; 0 where there is none. ``paused`` jobs were started,
    hold their KV blocks and are not ``running``. ``load_ms`` is how long the model took to load,
    and ``cuda_init_ms`` how long CUDA took, 0 without it (LB-6). ``sessions`` are the conversations
    whose KV is kept between two turns, ``session_blocks`` those of their blocks that no job uses;
    they count as free. ``drain_left_ms`` is how long running jobs still have while the worker
    drains; None while it does not. ``stuck_ms`` is how long the current step has taken, once that
    is far beyond the usual; else 0. ``not_finite_total`` jobs ended because their numbers were NaN
    or infinite. ``context_tokens_total`` is the sum over all steps of the context, in tokens, that
    each decoding row attended to; 0 where the engine does not say.
    """

    kv_blocks_total: int
    kv_blocks_used: int
    kv_blocks_free: int
    running: int
    waiting: int
    step_ms: float
    tokens_total: int
    late_tokens_total: int
    jobs_total: int
    check_us: float
    lanes: int = 0
    steps_total: int = 0
    busy_ms_total: float = 0.0
    prefill_tokens_total: int = 0
    cached_tokens_total: int = 0
    kv_blocks_cached: int = 0
    disk_saved_blocks_total: int = 0
    disk_loaded_blocks_total: int = 0
    hit_blocks_total: int = 0
    missed_blocks_total: int = 0
    disk_save_ms_total: float = 0.0
    disk_load_ms_total: float = 0.0
    disk_failures_total: int = 0
    stream_utilization: float = 0.0
    paused: int = 0
    load_ms: float = 0.0
    sessions: int = 0
    session_blocks: int = 0
    cuda_init_ms: float = 0.0
    drain_left_ms: float | None = None
    stuck_ms: float = 0.0
    not_finite_total: int = 0
    context_tokens_total: int = 0
    prompt_steps_total: int = 0
    prompt_busy_ms_total: float = 0.0


class KvReport(msgspec.Struct, array_like=True, frozen=True):
    """Blocks that entered and left the prefix cache. ``full`` replaces all that was known."""

    added: list[bytes]
    evicted: list[bytes]
    full: bool = False


class LaneError(msgspec.Struct, array_like=True, frozen=True):
    """The lane itself failed and closes with this frame."""

    code: Code
    message: str


class SwapPhase(StrEnum):
    """The phases of a swap of models."""

    CHECK = "check"
    """Checks that the new model is there, whole, and not too large; nothing has changed yet."""
    LOAD = "load"
    DRAIN = "drain"
    EVICT = "evict"
    """Ends the old model's engine, after its prefix cache has written what is for the disk."""
    UNLOAD = "unload"
    """Gives the old model's memory back."""
    RESTORE = "restore"
    """Loads the old model again, since the new one could not be loaded."""
    DONE = "done"
    FAILED = "failed"
    """The swap failed: the old model is served, or the process is about to end; see ``error``."""


class SwapReport(msgspec.Struct, array_like=True, frozen=True):
    """Progress of a swap, sent to its caller and on every lane.

    ``model`` is the new model's name, ``was`` the old one's. ``ms`` is how long each finished phase
    took, in order. ``beside``: the new model is loaded while the old one serves. ``freed_mib`` is
    by how much memory in use fell as the old one was unloaded.
    """

    phase: SwapPhase
    model: str
    was: str
    ms: dict[str, float] = {}
    error: str = ""
    beside: bool = False
    freed_mib: float = 0.0


class Frame(msgspec.Struct, array_like=True):
    """Everything that happened for one lane since its last frame.

    Order within: ``started``, then ``prompts``, ``cached``, ``deltas``, ``paused``, ``resumed``,
    then ``ends``. ``cached`` has, with a job's first tokens, what the prefix cache had of its
    prompt. A job that starts and ends within one frame is in ``started``, ``deltas`` and ``ends``.
    One that is in ``paused`` and ``resumed`` was paused in between. ``prompts`` are by
    handle, each job's in the order of its prompt, over as many frames as needed.
    """

    seq: int
    started: list[Started] = []
    deltas: list[Delta] = []
    ends: list[End] = []
    stats: WorkerStats | None = None
    card: ModelCard | None = None
    cache: KvReport | None = None
    draining: bool = False
    error: LaneError | None = None
    paused: list[int] = []
    resumed: list[int] = []
    prompts: list[tuple[int, PromptLogprobs]] = []
    swap: SwapReport | None = None
    cached: list[tuple[int, int]] = []


_encoder = msgspec.msgpack.Encoder()
_message_decoder: msgspec.msgpack.Decoder[LaneMessage] = msgspec.msgpack.Decoder(LaneMessage)
_frame_decoder = msgspec.msgpack.Decoder(Frame)


def encode(message: LaneMessage | Frame) -> bytes:
    """Encode a lane message or frame as msgpack."""
    return _encoder.encode(message)


def decode_message(data: bytes) -> LaneMessage:
    """Decode a message to the worker. Raises ``msgspec.DecodeError`` naming the wrong field."""
    try:
        return _message_decoder.decode(data)
    except UnicodeDecodeError as error:  # msgspec leaves this one as it is
        raise msgspec.DecodeError(
            f"a lane message's strings must be UTF-8: {error.reason} (byte {error.start} of one)"
        ) from None
    except RecursionError:
        raise msgspec.DecodeError("a lane message must not be nested so deeply") from None


def decode_frame(data: bytes) -> Frame:
    """Decode a frame from the worker. Raises ``msgspec.DecodeError`` naming the wrong field."""
    return _frame_decoder.decode(data)
