"""Lines of batches, served by the handlers of the live routes as batch-class work."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import msgspec
from aiohttp import web

from orchestrator.api.auth import NOBODY
from orchestrator.api.http import own_requests
from orchestrator.api.http.context import AUTH, CONTEXT, ORCHESTRATOR
from orchestrator.batches.records import BatchLine, LineOutcome, LineResult, StoredBatch
from orchestrator.batches.service import Batches
from orchestrator.clock import instant
from orchestrator.errors import (
    DeadlineExceeded,
    InstanceLost,
    InvalidRequest,
    TidegateError,
    Unauthenticated,
    Unavailable,
)
from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.job import Job, OnDisconnect, Priority


class HasBatches(Protocol):
    """The room that keeps batches; None where it keeps none."""

    @property
    def batches(self) -> Batches | None: ...


BATCHES = web.AppKey("batches", HasBatches)

Entry = Callable[[StoredBatch, BatchLine, LineOutcome, LineResult | None], bytes]
"""Renders a line's result for its client to read (``batches.shop.Server.entry``)."""


def batches_of(request: web.Request) -> Batches:
    """The service's batches. Raises ``InvalidRequest`` where it has none."""
    batches = request.app[BATCHES].batches
    if batches is None:
        raise InvalidRequest(
            "files and batches need a journal, and this service has none: its operator sets "
            "TIDEGATE_JOURNAL__PATH"
        )
    return batches


def owner_of(request: web.Request) -> str:
    """Fingerprint of the key whose files and batches a request may see."""
    return request[CONTEXT].key.fingerprint


class _Modes(msgspec.Struct, frozen=True):
    """The field that a line may not set, because it has one answer in one piece."""

    stream: bool | None = None


_modes = msgspec.json.Decoder(_Modes)


class BatchLines:
    """The ``batches.shop.Server`` of an application."""

    def __init__(self, app: web.Application, batches: Batches, entry: Entry) -> None:
        self._app = app
        self._batches = batches
        self._entry = entry

    def entry(
        self, batch: StoredBatch, line: BatchLine, kind: LineOutcome, answer: LineResult | None
    ) -> bytes:
        return self._entry(batch, line, kind, answer)

    def most_at_once(self, owner: str) -> int:
        """Half of the requests that the key may have in progress: the rest is for its other
        requests."""
        orchestrator = self._app[ORCHESTRATOR]
        limit = orchestrator.limits.concurrent_of(owner)
        return max(1, limit // 2) if limit else self._batches.config.window

    async def serve(self, batch: StoredBatch, line: BatchLine, due_at: float) -> LineResult:
        name = f"{batch.id}/{line.number}"
        orchestrator = self._app[ORCHESTRATOR]
        key = self._app[AUTH].key_with(batch.owner)
        is_own = False

        def adapt(job: Job) -> Job:
            nonlocal is_own
            is_own = not job.deadline.is_default and job.deadline.at < due_at
            left_s, now = due_at - orchestrator.clock.now(), instant(orchestrator.clock)
            whole = Deadline(due_at, round((now.unix + left_s) * 1000))
            return replace(
                job,
                deadline=job.deadline if is_own else whole,
                priority=Priority.BATCH,
                # Nobody comes back for a line that its batch has given up.
                on_disconnect=OnDisconnect.CANCEL,
                keep=False,
            )

        reply = await own_requests.send(
            self._app,
            batch.endpoint,
            line.body,
            key=key or NOBODY,
            name=name,
            adapt=adapt,
            refusal=_withdrawn() if key is None else _unserved(line.body),
        )
        kind = LineOutcome.SUCCEEDED if reply.error is None else LineOutcome.ERRORED
        if isinstance(reply.error, DeadlineExceeded) and not is_own:
            kind = LineOutcome.EXPIRED
        return LineResult(
            kind,
            reply.status,
            name,
            reply.body,
            None if reply.error is None else self._retry_after_s(reply.error),
            isinstance(reply.error, InstanceLost),
        )

    def _retry_after_s(self, error: TidegateError) -> float | None:
        """Seconds until a retry makes sense; None for an error that a retry would not change."""
        if isinstance(error, Unavailable) and error.retryable:
            return error.retry_after_ms / 1000
        return None


def _withdrawn() -> Unauthenticated:
    return Unauthenticated("the API key that created this batch has been removed")


def _unserved(body: bytes) -> InvalidRequest | None:
    """Error for a line that asks for more than one answer in one piece; None if it does not."""
    try:
        modes = _modes.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None  # the route reports what is wrong
    if not modes.stream:
        return None
    return InvalidRequest(
        "stream is not supported in a batch: each line has one answer in one piece", field="stream"
    )
