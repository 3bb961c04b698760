"""Records of tasks as they are stored: in MessagePack. A record that cannot be read costs its own
task only."""

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from orchestrator.tasks.journal.records import StoredRequest, StoredResult, StoredTokens
from orchestrator.telemetry.log import fields, service_log

R = TypeVar("R", StoredRequest, StoredResult)

pack = msgspec.msgpack.Encoder().encode


def read_record(kind: type[R], task: str | int, body: bytes | None) -> R | None:
    """A task's request or result; None where there is none, or it cannot be read. ``task`` is what
    the store calls the task."""
    if body is None:
        return None
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.DecodeError:
        service_log.exception("a task in the journal cannot be read", extra=fields(task=task))
        return None


def read_tokens(task: str | int, rows: Iterable[tuple[int, bytes]]) -> StoredTokens:
    """The tokens of a task from records in order, each with the index of its first token: as far
    as they follow each other without a gap, and can be read."""
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
