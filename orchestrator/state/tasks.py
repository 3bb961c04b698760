"""Durable tasks in the shared store: a ``JournalStore`` for several orchestrators."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

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


class SharedTasks:
    """Durable tasks of one orchestrator. Its ``tag`` is their owner."""

    def __init__(self, config: StateConfig, tag: str) -> None:
        self.config = config
        self.tag = tag
        self.names = Names(config.prefix)
        self._boot = this_boot()
        self.skew_s = 0.0
        """Seconds by which the store's clock is ahead of this machine's clock."""
        self.rows: dict[int, TaskRow] = {}
        """Rows of this process's tasks without an end in the store, by number."""
        self._last_claimed = 0

    def store(self) -> JournalStore:
        # Each thread closes its own connection.
        window_ms, close = self.config.terms.window_ms, lambda: None
        writer, reader = partial(SharedWriter, self), partial(SharedReader, self)
        return JournalStore(self._boot, window_ms, 1, (), writer, reader, close)

    def known_ids(self) -> set[str]:
        return {row.id for row in list(self.rows.values())}

    def claimed(
        self, task_id: str, record: Mapping[bytes, bytes], tokens: Iterable[bytes]
    ) -> UnfinishedTask:
        """A task that was taken over, made from its records. Raises ``msgspec.DecodeError``."""
        self._last_claimed -= 1  # below the numbers of tasks that this process accepted
        found = _row_of(task_id, record)
        if found is None:
            raise msgspec.DecodeError("it has no readable row")
        row = self.rows[self._last_claimed] = replace(found, n=self._last_claimed)
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
        self._unsure: dict[int, TaskRow] = {}
        """Refused tasks that the store may have accepted."""

    def _write(self, operations: Sequence[Operation]) -> None:
        client = self._connection()
        unsure = dict(self._unsure)
        with client.pipeline(transaction=False) as pipe:
            pipe.get(self._names.layout)
            for row in unsure.values():
                self._add_end(pipe, row, None)
            for one in operations:
                self._add(pipe, one)
                if isinstance(one, Accept):
                    self._unsure[one.row.n] = one.row
            if self._fault or not operations:  # unlike a task, later writes may need no memory
                pipe.set(self._names.room, b"", px=_MIN_MS)
            layout, *answers = pipe.execute(raise_on_error=False)
        self._note(operations, answers[len(unsure) : len(unsure) + len(operations)])
        for answer in (layout, *answers):
            if isinstance(answer, Exception):
                raise answer
        accepted = {one.row.n for one in operations if isinstance(one, Accept)}
        for n in unsure.keys() - accepted:
            self._tasks.rows.pop(n, None)
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
                self._tasks.rows.pop(one.n, None)

    def _promised(self, operations: Sequence[Operation]) -> list[Operation]:
        """The operations that must eventually be written. A full store accepts ends, which free
        memory, and refuses the rest."""
        return [
            one
            for one in super()._promised(operations)
            if not isinstance(one, Ended) or one.n in self._tasks.rows
        ]

    def _begin_anew(self, client: redis.Redis) -> None:
        """Write the live tasks to a store that was emptied. Their tokens follow."""
        connection.check(client, self._names)
        with client.pipeline(transaction=False) as pipe:
            for accept in self._calls.live():
                self._add(pipe, accept)
            pipe.execute()

    def _add(self, pipe: Any, one: Operation) -> None:
        tasks, tag, names = self._tasks, self._tasks.tag, self._names
        if isinstance(one, Accept):
            row = tasks.rows[one.row.n] = one.row
            submission = names.submission(row.key, row.idempotency_key)
            keys = (names.task(row.id), names.held(tag), submission)
            facts = (pack(row), tasks.request_of(one), int(row.idempotency_key is not None))
            pipe.eval(scripts.ACCEPT, 3, *keys, row.id, tag, *facts)
        elif (known := tasks.rows.get(one.n)) is None:
            pipe.echo(0)
        elif isinstance(one, Tokens):
            body = pack((one.first, pack(one.tokens))) if one.tokens.texts else b""
            pipe.eval(scripts.TOKENS, 2, names.task(known.id), names.tokens(known.id), tag, body)
        else:
            self._add_end(pipe, known, one)

    def _add_end(self, pipe: Any, row: TaskRow, end: Ended | None) -> None:
        """Add a task's end. Without ``end``, the task was never accepted."""
        names, tag = self._names, self._tasks.tag
        keep_s = store.KEEP_OUTCOMES_S, self._tasks.config.terms.keep_results_s
        keep_ms = [max(_MIN_MS, round(1000 * seconds)) for seconds in keep_s]
        stored = (b"", b"", *keep_ms, 0)
        if end is not None and end.is_accepted:
            stored = (pack(end_of(end)), pack(end.result), *keep_ms, 1)
        submission = names.submission(row.key, row.idempotency_key)
        keys = (names.task(row.id), names.tokens(row.id), names.held(tag), submission)
        pipe.eval(scripts.END, 5, *keys, names.result(row.id), row.id, tag, *stored)

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
        self._client: Any = connection.connect(tasks.config)

    def _look(self, question: Question) -> Found | None:
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
        self._client.close()


def _row_of(task_id: str, record: Mapping[bytes, bytes]) -> TaskRow | None:
    row = read_record(TaskRow, task_id, record.get(b"row"))
    end = read_record(StoredEnd, task_id, record.get(b"end"))
    return row if row is None or end is None else replace(row, **msgspec.structs.asdict(end))
