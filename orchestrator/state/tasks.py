"""Durable tasks in the shared store: a ``JournalStore`` for several orchestrators."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import msgspec
import redis

from orchestrator.clock import this_boot
from orchestrator.state import connection, scripts
from orchestrator.state.connection import Names, StateConfig
from orchestrator.tasks.journal import store
from orchestrator.tasks.journal.records import (
    Accept,
    Ended,
    Operation,
    StoredEnd,
    StoredRequest,
    StoredResult,
    TaskRow,
    Tokens,
    UnfinishedTask,
    end_of,
    pack,
    read_record,
    read_tokens,
)
from orchestrator.tasks.journal.store import (
    Found,
    GroupCommit,
    JournalStore,
    LookUps,
    Question,
    WriterCalls,
)

_MIN_MS = 1
"""Shortest retention that the store knows, in ms."""


class _Name(NamedTuple):
    """The store's name for a task; this process uses the task's number."""

    task_id: str
    submission: str
    is_named: bool


class SharedTasks:
    """Durable tasks of one orchestrator. Its ``tag`` is their owner."""

    def __init__(self, config: StateConfig, tag: str) -> None:
        self.config = config
        self.tag = tag
        self.names = Names(config.prefix)
        self._boot = this_boot()
        self.skew_s = 0.0
        """Seconds by which the store's clock is ahead of this machine's clock."""
        self.by_number: dict[int, _Name] = {}
        self._last_claimed = 0

    def store(self) -> JournalStore:
        # Each thread closes its own connection.
        window_ms, close = self.config.terms.window_ms, lambda: None
        writer, reader = partial(SharedWriter, self), partial(SharedReader, self)
        return JournalStore(self._boot, window_ms, 1, (), writer, reader, close)

    def known_ids(self) -> set[str]:
        """Ids of this process's tasks without an end in the store."""
        return {name.task_id for name in list(self.by_number.values())}

    def name(self, row: TaskRow) -> _Name:
        """Remember a task's name in the store, for later writes."""
        submission = self.names.submission(row.key, row.idempotency_key)
        named = _Name(row.id, submission, row.idempotency_key is not None)
        self.by_number[row.n] = named
        return named

    def claimed(
        self, task_id: str, record: Mapping[bytes, bytes], tokens: Iterable[bytes]
    ) -> UnfinishedTask:
        """A task that was taken over, made from its records. Raises ``msgspec.DecodeError``."""
        self._last_claimed -= 1  # below the numbers of tasks that this process accepted
        found = _row_of(task_id, record)
        if found is None:
            raise msgspec.DecodeError("it has no readable row")
        row = replace(found, n=self._last_claimed)
        self.name(row)
        request = read_record(StoredRequest, task_id, record.get(b"request"))
        blobs = (msgspec.msgpack.decode(each, type=tuple[int, bytes]) for each in tokens)
        known = read_tokens(task_id, blobs)
        return UnfinishedTask(row, self._shifted(request, -self.skew_s), known)

    def request_of(self, accept: Accept) -> bytes:
        """The record of a task's request. Its times are by the store's clock."""
        request = self._shifted(accept.request, self.skew_s)
        return b"" if request is None else pack(request)

    def _shifted(self, request: StoredRequest | None, by_s: float) -> StoredRequest | None:
        if request is None:
            return None
        return msgspec.structs.replace(request, clock_offset=request.clock_offset + by_s)


class SharedWriter(GroupCommit):
    """Writes to the store. A transaction takes one round trip."""

    failures = connection.FAILURES

    def __init__(self, tasks: SharedTasks, calls: WriterCalls) -> None:
        super().__init__(tasks.config.where, tasks.config.terms.window_ms, calls)
        self._tasks = tasks
        self._names = tasks.names
        self._client: redis.Redis | None = None
        self._unsure: dict[int, _Name] = {}
        """Refused tasks that the store may have accepted."""

    def _write(self, operations: Sequence[Operation]) -> None:
        client = self._connection()
        unsure = dict(self._unsure)
        with client.pipeline(transaction=False) as pipe:
            pipe.get(self._names.layout)
            for name in unsure.values():
                self._add_end(pipe, name, None)
            for one in operations:
                self._add(pipe, one)
                if isinstance(one, Accept):
                    self._unsure[one.row.n] = self._tasks.by_number[one.row.n]
            if self._fault or not operations:  # unlike a task, later writes may need no memory
                pipe.set(self._names.room, b"", px=_MIN_MS)
            layout, *answers = pipe.execute(raise_on_error=False)
        self._note(operations, answers[len(unsure) : len(unsure) + len(operations)])
        for answer in (layout, *answers):
            if isinstance(answer, Exception):
                raise answer
        accepted = {one.row.n for one in operations if isinstance(one, Accept)}
        for n in unsure.keys() - accepted:
            self._tasks.by_number.pop(n, None)
        self._unsure = {}
        if layout is None:
            self._begin_anew(client)

    def _note(self, operations: Sequence[Operation], answers: Sequence[Any]) -> None:
        """Process the store's answer to each operation. A refused one has its exception."""
        for one, answer in zip(operations, answers, strict=True):
            if isinstance(answer, Exception):
                continue
            if isinstance(one, Accept):
                if answer == 2:
                    self._batch.named_elsewhere.add(one.row.n)
                continue
            if answer == 1:
                self._batch.lost.add(one.n)
            if isinstance(one, Ended):
                self._tasks.by_number.pop(one.n, None)

    def _promised(self, operations: Sequence[Operation]) -> list[Operation]:
        """The operations that must eventually be written. A full store accepts ends, which free
        memory, and refuses the rest."""
        return [
            one
            for one in super()._promised(operations)
            if not isinstance(one, Ended) or one.n in self._tasks.by_number
        ]

    def _begin_anew(self, client: redis.Redis) -> None:
        """Write the live tasks to a store that was emptied. Their tokens follow."""
        connection.check(client, self._names)
        with client.pipeline(transaction=False) as pipe:
            for accept in self._calls.live():
                self._add(pipe, accept)
            pipe.execute()

    def _add(self, pipe: Any, one: Operation) -> None:
        tag, names = self._tasks.tag, self._names
        if isinstance(one, Accept):
            name = self._tasks.name(one.row)
            keys = (names.task(name.task_id), names.held(tag), name.submission)
            row, request = pack(one.row), self._tasks.request_of(one)
            named = int(name.is_named)
            pipe.eval(scripts.ACCEPT, 3, *keys, name.task_id, tag, row, request, named)
        elif isinstance(one, Tokens):
            known = self._tasks.by_number.get(one.n)
            if known is None:
                pipe.echo(0)
                return
            body = b""
            if one.tokens.texts:
                body = pack((one.first, pack(one.tokens)))
            task, tokens = names.task(known.task_id), names.tokens(known.task_id)
            pipe.eval(scripts.TOKENS, 2, task, tokens, tag, body)
        else:
            self._add_end(pipe, self._tasks.by_number.get(one.n), one)

    def _add_end(self, pipe: Any, name: _Name | None, end: Ended | None) -> None:
        """Add a task's end. Without ``end``, the task was never accepted."""
        if name is None:
            pipe.echo(0)
            return
        names, terms, tag = self._names, self._tasks.config.terms, self._tasks.tag
        accepted = end is not None and end.is_accepted
        stored = result = b""
        if end is not None and accepted:
            stored = pack(end_of(end))
            result = pack(end.result)
        task_id = name.task_id
        pipe.eval(
            scripts.END,
            5,
            names.task(task_id),
            names.tokens(task_id),
            names.held(tag),
            name.submission,
            names.result(task_id),
            task_id,
            tag,
            stored,
            result,
            max(_MIN_MS, round(1000 * store.KEEP_OUTCOMES_S)),
            max(_MIN_MS, round(1000 * terms.keep_results_s)),
            int(accepted),
        )

    def _connection(self) -> redis.Redis:
        if self._client is None:
            client = connection.connect(self._tasks.config)
            connection.check(client, self._names)
            self._client = client
        return self._client

    def _failed(self, error: Exception) -> str:
        if not isinstance(error, redis.ResponseError):  # otherwise it answers and may accept some
            self._disconnect()
        return connection.describe_error(error)

    def _tidy(self) -> None:
        """Check the store, so that an outage is known before the next task arrives."""
        try:
            self._write([])
            self._tell("")
        except self.failures as error:
            self._tell(self._failed(error))
        self._calls.on_fault(self._fault)
        self._tidy_at = time.monotonic() + store.RETRY_S

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


class SharedReader(LookUps):
    """Looks up tasks of all orchestrators in the store."""

    failures = connection.FAILURES

    def __init__(self, tasks: SharedTasks) -> None:
        super().__init__()
        self._tasks = tasks
        self._client: Any = None

    def _look(self, question: Question) -> Found | None:
        if self._client is None:
            self._client = connection.connect(self._tasks.config)
        client, names = self._client, self._tasks.names
        task_id = question
        if not isinstance(task_id, str):
            named = client.get(names.submission(*task_id))
            if named is None:
                return None
            task_id = named.decode()
        with client.pipeline(transaction=False) as pipe:
            pipe.hgetall(names.task(task_id))
            pipe.get(names.result(task_id))
            record, result = pipe.execute()
        row = _row_of(task_id, record)
        return None if row is None else Found(row, read_record(StoredResult, task_id, result))

    def _told(self, error: Exception) -> str:
        return connection.describe_error(error)

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()


def _row_of(task_id: str, record: Mapping[bytes, bytes]) -> TaskRow | None:
    row = read_record(TaskRow, task_id, record.get(b"row"))
    end = read_record(StoredEnd, task_id, record.get(b"end"))
    return row if row is None or end is None else replace(row, **msgspec.structs.asdict(end))
