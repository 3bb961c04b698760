"""The stored form of a durable task, and the task made from it.

Records are stored in MessagePack. A record that cannot be read costs its own task only.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec

from orchestrator.clock import Boot, Clock
from orchestrator.errors import TidegateError, with_code
from orchestrator.tasks.deadline import NO_PARTS, Deadline, Parts
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.job import Api, Job
from orchestrator.tasks.task import Task
from orchestrator.tasks.work import Stage
from orchestrator.telemetry.log import fields, service_log
from protocol import Code, FinishReason, Outcome, Sampling, TokenLogprob

_IDS = "I"
_ID_BYTES = array(_IDS).itemsize


class StoredRequest(msgspec.Struct, frozen=True, kw_only=True):
    """All data to run a task again. Removed when it ends."""

    job: Job
    """The job with its sampling after admission, with a seed if tokens are sampled."""
    token_ids: bytes
    vocabulary: bytes
    model_digest: str
    cache_salt: str
    clock_offset: float
    """Unix time minus the clock's seconds, for the times in ``job``."""

    def __post_init__(self) -> None:
        _check_ids(self.token_ids)


class StoredTokens(msgspec.Struct, frozen=True):
    """A part of a running task's tokens."""

    ids: bytes
    texts: list[str]
    spent_s: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Time spent when these tokens were passed on; see ``TimeSpent.seconds``."""

    def __post_init__(self) -> None:
        if len(self.ids) != _ID_BYTES * len(self.texts):
            raise ValueError(f"{len(self.texts)} texts, {len(self.ids)} bytes of token ids")


class StoredError(msgspec.Struct, frozen=True):
    """The error of a task that ended with one."""

    code: Code
    message: str
    retryable: bool
    field: str | None
    details: dict[str, str | int | float | bool | None]


class StoredResult(msgspec.Struct, frozen=True, kw_only=True):
    """A task's ending and output. Removed after its retention."""

    ids: bytes
    texts: list[str]
    logprobs: list[TokenLogprob]
    ending: Ending
    """Its error is apart; the client's stop string is not kept."""
    error: StoredError | None
    cached_tokens: int
    fitted_tokens: int | None
    clamped_ms: float | None
    start_wait_s: float | None
    """Seconds from its arrival to its start; None if it never started."""
    first_id_free: int
    deadline_source: str = ""

    def __post_init__(self) -> None:
        _check_ids(self.ids)


@dataclass(frozen=True, slots=True)
class TaskRow:
    """The row of ``tasks``, which is kept longer than the other records."""

    n: int
    id: str
    key: str
    idempotency_key: str | None
    digest: bytes
    accepted_unix: float
    deadline_unix_ms: int
    model: str
    correlation_id: str
    prompt_tokens: int
    ended_unix: float | None = None
    outcome: str | None = None
    finish_reason: str | None = None
    code: str | None = None
    completion_tokens: int | None = None
    boot_id: str | None = None
    arrived_boot_s: float | None = None
    """When the task arrived, on the clock of that boot."""


@dataclass(frozen=True, slots=True)
class UnfinishedTask:
    """A task that had not ended. ``request`` is None if it is unreadable."""

    row: TaskRow
    request: StoredRequest | None
    tokens: StoredTokens


COLUMNS = tuple(TaskRow.__dataclass_fields__)


def pack_ids(ids: Sequence[int]) -> bytes:
    return array(_IDS, ids).tobytes()


def unpack_ids(blob: bytes) -> list[int]:
    ids = array(_IDS)
    ids.frombytes(blob)
    return ids.tolist()


def _check_ids(blob: bytes) -> None:
    """Raise ``ValueError`` for broken ids; msgspec converts it to a ``ValidationError``."""
    if len(blob) % _ID_BYTES:
        raise ValueError(f"{len(blob)} bytes of token ids, which have {_ID_BYTES} each")


def row_of(n: int, task: Task, clock: Clock, boot: Boot) -> TaskRow:
    job = task.job
    before_s = clock.now() - job.arrived
    return TaskRow(
        n=n,
        id=task.id,
        key=job.key,
        idempotency_key=job.idempotency_key or None,
        digest=job.body_digest,
        accepted_unix=clock.unix() - before_s,
        deadline_unix_ms=task.deadline.unix_ms,
        model=task.served_name,
        correlation_id=task.correlation_id,
        prompt_tokens=task.prompt_tokens,
        boot_id=boot.id,
        arrived_boot_s=boot.now() - before_s,
    )


def request_of(task: Task, model_digest: str, clock_offset: float) -> StoredRequest:
    return StoredRequest(
        # A client's numbers may have any size; those after admission fit.
        job=replace(task.job, sampling=task.sampling),
        token_ids=pack_ids(task.token_ids),
        vocabulary=task.vocabulary,
        model_digest=model_digest,
        cache_salt=task.cache_salt,
        clock_offset=clock_offset,
    )


def result_of(task: Task) -> StoredResult:
    ending, transcript, marks = task.ending, task.transcript, task.marks
    assert ending is not None and transcript is not None
    error = ending.error
    return StoredResult(
        ids=pack_ids(transcript.ids),
        texts=transcript.texts,
        logprobs=transcript.logprobs,
        ending=replace(ending, error=None, stop="", stop_token_id=None),
        error=None
        if error is None
        else StoredError(error.code, error.message, error.retryable, error.field, error.details),
        cached_tokens=task.cached_tokens,
        fitted_tokens=task.fitted_tokens,
        clamped_ms=task.deadline.clamped_ms,
        start_wait_s=marks.started - marks.received if marks.started else None,
        first_id_free=task.first_id_free,
        deadline_source=task.deadline.source,
    )


def live_task(row: TaskRow, stored: StoredRequest, clock: Clock, boot: Boot) -> Task:
    """A task that had not ended, with its client's deadlines."""
    job = stored.job
    shift = _arrived(row, stored, clock, boot) - job.arrived
    deadline, parts = job.deadline, job.parts
    job = replace(
        job,
        arrived=job.arrived + shift,
        deadline=deadline.moved(shift),
        parts=NO_PARTS
        if parts == NO_PARTS
        else Parts(parts.first_token_at + shift, parts.token_gap_s, parts.cut_at + shift),
    )
    task = Task(row.id, job)
    task.model = row.model
    task.vocabulary = stored.vocabulary
    task.cache_salt = stored.cache_salt
    task.token_ids = unpack_ids(stored.token_ids)
    task.prompt_tokens = len(task.token_ids)
    return task


def _arrived(row: TaskRow, stored: StoredRequest, clock: Clock, boot: Boot) -> float:
    """When a task arrived, on our clock: from the boot's clock within the same boot, otherwise from
    the wall clock. That may have been set back, but never leaves more time than at first."""
    now = clock.now()
    if row.arrived_boot_s is not None and boot.has(row.boot_id, row.arrived_boot_s):
        return now - (boot.now() - row.arrived_boot_s)
    arrived_unix = stored.job.arrived + stored.clock_offset
    return now - max(clock.unix() - arrived_unix, 0.0)


def bare_job(row: TaskRow, clock: Clock, clamped_ms: float | None = None, source: str = "") -> Job:
    """The known parts of the job of a row without its request."""
    offset, due_ms = clock.unix() - clock.now(), row.deadline_unix_ms
    return Job(
        api=Api.NATIVE,
        model=row.model,
        sampling=Sampling(max_tokens=1),
        max_tokens=None,
        deadline=Deadline(due_ms / 1000 - offset, due_ms, clamped_ms, source=source),
        correlation_id=row.correlation_id,
        arrived=row.accepted_unix - offset,
        keep=True,
        key=row.key,
        durable=True,
    )


def ended_task(row: TaskRow, result: StoredResult | None, clock: Clock) -> Task:
    """An ended task; without ``result`` it has no text."""
    assert row.ended_unix is not None and row.outcome is not None
    stated = () if result is None else (result.clamped_ms, result.deadline_source)
    task = Task(row.id, bare_job(row, clock, *stated))
    task.model = row.model
    task.prompt_tokens = row.prompt_tokens
    task.completion_tokens = row.completion_tokens or 0
    task.stage = Stage.ENDED
    marks = task.marks
    marks.ended = row.ended_unix - (clock.unix() - clock.now())
    transcript = task.record()
    if result is None:
        task.is_text_removed = True
        code = row.code and Code(row.code)
        task.ending = Ending(
            Outcome(row.outcome),
            FinishReason(row.finish_reason or FinishReason.ERROR),
            with_code(code, "the task's result is no longer kept") if code else None,
        )
        return task
    transcript.ids = unpack_ids(result.ids)
    transcript.texts = result.texts
    transcript.logprobs = result.logprobs
    task.cached_tokens = result.cached_tokens
    task.fitted_tokens = result.fitted_tokens
    task.first_id_free = result.first_id_free
    if result.start_wait_s is not None:
        marks.started = marks.received + result.start_wait_s or marks.received
    error = None if result.error is None else _error_of(result.error)
    task.ending = replace(result.ending, error=error)
    return task


def _error_of(stored: StoredError) -> TidegateError:
    error = with_code(stored.code, stored.message)
    error.field, error.details, error.retryable = stored.field, stored.details, stored.retryable
    return error


@dataclass(frozen=True, slots=True)
class Accept:
    """A task that must be on disk before it is accepted."""

    row: TaskRow
    request: StoredRequest | None
    """The request to run the task; None if an earlier process wrote an unreadable one."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """More tokens of a task, from index ``first`` on."""

    n: int
    first: int
    tokens: StoredTokens


@dataclass(frozen=True, slots=True)
class Ended:
    """A task has ended."""

    n: int
    ended_unix: float
    completion_tokens: int
    result: StoredResult
    is_accepted: bool = True
    """Whether the task was accepted; if not, it keeps no idempotency key."""


class StoredEnd(msgspec.Struct, frozen=True, array_like=True):
    """The part of a row that is known only at the task's end."""

    ended_unix: float
    outcome: str
    finish_reason: str
    code: str | None
    completion_tokens: int


def end_of(end: Ended) -> StoredEnd:
    ending, error = end.result.ending, end.result.error
    outcome, reason = ending.outcome.value, ending.finish_reason.value
    code = None if error is None else error.code.value
    return StoredEnd(end.ended_unix, outcome, reason, code, end.completion_tokens)


Operation = Accept | Tokens | Ended


@dataclass(slots=True)
class Batch:
    """The operations of one transaction, whether it succeeded or not."""

    operations: list[Operation] = field(default_factory=list)
    fault: str = ""
    """Why none of it is on disk; empty if all of it is."""
    lost: set[int] = field(default_factory=set)
    """Numbers of tasks that another orchestrator took over: their operations were not written."""
    named_elsewhere: set[int] = field(default_factory=set)
    """Numbers of tasks that were not accepted: their key already has a task of that name."""


R = TypeVar("R")

pack = msgspec.msgpack.Encoder().encode


def read_record(kind: type[R], task: str | int, body: bytes | None) -> R | None:
    """The request or result of ``task``; None if there is no readable one."""
    if body is None:
        return None
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.DecodeError:
        service_log.exception("a task in the journal cannot be read", extra=fields(task=task))
        return None


def read_tokens(task: str | int, rows: Iterable[tuple[int, bytes]]) -> StoredTokens:
    """The tokens of a task from ordered records, each with the index of its first token, up to the
    first gap or unreadable record."""
    ids, texts, spent_s = bytearray(), list[str](), StoredTokens(b"", []).spent_s
    for first, body in rows:
        if first < len(texts):  # written again from the beginning, into a new store
            continue
        if first > len(texts):
            break
        try:
            batch = msgspec.msgpack.decode(body, type=StoredTokens)
        except msgspec.DecodeError:
            service_log.exception("tokens in the journal cannot be read", extra=fields(task=task))
            break
        ids += batch.ids
        texts += batch.texts
        spent_s = batch.spent_s
    return StoredTokens(bytes(ids), texts, spent_s)
