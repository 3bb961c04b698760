"""Records of tasks as they are stored: packed, and sealed where there is a key.

``name`` is what the store calls the task by. It is part of what is sealed, so that nobody can put
one task's record in another's place.
"""

from collections.abc import Iterable

import msgspec

from orchestrator.tasks.journal.records import StoredRequest, StoredResult, StoredTokens
from orchestrator.tasks.journal.sealing import Sealer, WrongKey
from orchestrator.telemetry.log import fields, service_log

_encode = msgspec.msgpack.Encoder().encode


def sealed_request(sealer: Sealer, name: str | int, request: StoredRequest) -> bytes:
    return sealer.seal(_encode(request), f"request {name}")


def sealed_tokens(sealer: Sealer, name: str | int, first: int, tokens: StoredTokens) -> bytes:
    """``first`` is the index of the first of these tokens."""
    return sealer.seal(_encode(tokens), f"tokens {name} {first}")


def sealed_result(sealer: Sealer, name: str | int, result: StoredResult) -> bytes:
    return sealer.seal(_encode(result), f"result {name}")


def read_request(sealer: Sealer, name: str | int, body: bytes | None) -> StoredRequest | None:
    """The request in a record; None where there is none, or it cannot be read."""
    if body is None:
        return None
    try:
        return msgspec.msgpack.decode(sealer.open(body, f"request {name}"), type=StoredRequest)
    except (msgspec.DecodeError, WrongKey):  # every key is there, as the probes have shown
        service_log.exception("a task in the journal cannot be read", extra=fields(task=name))
        return None


def read_result(sealer: Sealer, name: str | int, body: bytes | None) -> StoredResult | None:
    """The result in a record; None where there is none, or it cannot be read."""
    if body is None:
        return None
    try:
        return msgspec.msgpack.decode(sealer.open(body, f"result {name}"), type=StoredResult)
    except (msgspec.DecodeError, WrongKey):
        service_log.exception("a result in the journal cannot be read", extra=fields(task=name))
        return None


def read_tokens(sealer: Sealer, name: str | int, rows: Iterable[tuple[int, bytes]]) -> StoredTokens:
    """The tokens of a task from records in order, each with the index of its first token: as far
    as they follow each other without a gap, and can be read."""
    ids, texts, spent_s = bytearray(), list[str](), StoredTokens(b"", []).spent_s
    for first, body in rows:
        if first < len(texts):  # written again from the beginning, into a new store
            continue
        if first > len(texts):
            break
        try:
            blob = sealer.open(body, f"tokens {name} {first}")
            batch = msgspec.msgpack.decode(blob, type=StoredTokens)
        except (msgspec.DecodeError, WrongKey):
            service_log.exception("tokens in the journal cannot be read", extra=fields(task=name))
            break
        ids += batch.ids
        texts += batch.texts
        spent_s = batch.spent_s
    return StoredTokens(bytes(ids), texts, spent_s)
