"""A task's events as server-sent events, live and replayed (OR-1).

Events are numbered, so that a client can resume after it loses its connection::

    0 queued   1 started   2 … n+1 one per token   n+2 end or error

If a task ends before it starts, its terminal event has number 1. Text that is held back until the
end is one more ``token`` event without ids. ``metrics`` events between the tokens have no number.
They are dropped for a client that is behind and never replayed. A follower first replays the task's
transcript and then listens to the task.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Final

import msgspec

from orchestrator.api.http.context import Dialect
from orchestrator.api.http.event_stream import EventStream, event_of
from orchestrator.api.http.field_errors import must
from orchestrator.api.http.responses import task_fields
from orchestrator.clock import Clock
from orchestrator.errors import TidegateError
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.task import Task
from protocol import Delta, Outcome, TokenLogprob


def error_object(error: TidegateError) -> dict[str, object]:
    """An error as a JSON object: for error responses, a task's ``error`` and ``error`` events."""
    body: dict[str, object] = {
        "code": error.code.value,
        "message": error.message,
        "retryable": error.retryable,
    }
    if error.field is not None:
        body["field"] = error.field
    return body | error.details


NATIVE = Dialect("/v2", lambda error, request_id: {"error": error_object(error)})


FIRST_TOKEN = 2
"""Number of the first token's event."""
PIECE_TOKENS = 256
"""Tokens that one replay piece has."""
METRICS_EVERY_S: Final = 1.0
"""Shortest time in seconds between two ``metrics`` events: people read no faster."""

_encode = msgspec.json.Encoder().encode


def read_last_event_id(value: str | None) -> int:
    """Number of the last event that the client has; -1 for none. Raises ``InvalidRequest``."""
    if value is None or not value.strip():
        return -1
    if not (value.isascii() and value.isdigit() and len(value) <= 15):
        raise must("Last-Event-ID", f"be the id of an event of this task, got {value[:64]!r}")
    return int(value)


def last_number(task: Task) -> int | None:
    """Number of a task's terminal event; None if the task has not ended."""
    if task.ending is None:
        return None
    ending = task.ending
    number = FIRST_TOKEN + task.completion_tokens if task.marks.started else 1
    number += bool(ending.tail)
    # After a restart, a text may be shorter than the part that its client already has.
    is_cut_short = ending.error is not None or ending.outcome is Outcome.PARTIAL
    return max(number, task.first_id_free) if is_cut_short else number


class NumberedEvents:
    """Sends a client the numbered events that it does not have: those after ``after``."""

    def __init__(self, stream: EventStream, after: int) -> None:
        self._stream = stream
        self._after = after

    def _event(self, number: int, kind: str, data: object) -> bytes:
        """One encoded event; empty if the client has it."""
        if number <= self._after:
            return b""
        return b"id: %d\nevent: %b\ndata: %b\n\n" % (number, kind.encode(), _encode(data))


class TaskEvents(NumberedEvents):
    """Sends one task's events to one client, starting after event ``after``."""

    def __init__(self, stream: EventStream, after: int, clock: Clock) -> None:
        super().__init__(stream, after)
        self._clock = clock
        self._metrics_at = clock.now() + METRICS_EVERY_S

    @property
    def is_behind(self) -> bool:
        return self._stream.is_behind

    def replay(self, task: Task, queue_position: int) -> Iterator[bytes]:
        """Yield past events in pieces, while the task continues, then follow it."""
        queued = {"task_id": task.id, "queue_position": queue_position}
        yield self._event(0, "queued", queued)
        transcript = task.record()
        started, sent = False, 0
        while True:
            if task.marks.started and not started:
                started = True
                yield self._event(1, "started", _start_data(task))
            elif sent < len(transcript.ids):
                piece = slice(sent, sent + PIECE_TOKENS)
                ids, texts = transcript.ids[piece], transcript.texts[piece]
                yield self._token_events(sent, ids, texts, transcript.logprobs[piece])
                sent += len(ids)
            else:
                break
        if task.ending is not None:
            self.ended(task)
        else:
            task.listen(self)

    # as a listener

    def started(self, task: Task) -> None:
        self._stream.send(self._event(1, "started", _start_data(task)))

    def tokens(self, task: Task, delta: Delta) -> None:
        first = task.completion_tokens - len(delta.ids)
        self._stream.send(self._token_events(first, delta.ids, delta.texts, delta.logprobs or ()))
        now = self._clock.now()
        if now >= self._metrics_at:
            self._metrics_at = now + METRICS_EVERY_S
            self._stream.offer(event_of("metrics", _metrics_data(task, now, self._stream.dropped)))

    def ended(self, task: Task) -> None:
        if task.entry is None or task.entry.is_left:
            self._finish(task)
        else:  # a crash must not change an end that a client has seen
            task.entry.when_recorded(lambda: self._finish(task))

    # inside

    def _finish(self, task: Task) -> None:
        if task.entry is not None and task.entry.is_left:  # another process continues the task
            self._stream.cut()
            return
        ending, number = task.ending, last_number(task)
        assert ending is not None and number is not None
        last = b""
        if ending.tail:
            tail = {"text": ending.tail, "token_ids": [], "index": task.completion_tokens}
            last = self._event(number - 1, "token", tail)
        data = ended(task, ending) | {"correlation_id": task.correlation_id}
        if ending.error is None:
            last += self._event(number, "end", data)
        else:
            last += self._event(number, "error", error_object(ending.error) | data)
        self._stream.finish(last)

    def _token_events(
        self, first: int, ids: Sequence[int], texts: Sequence[str], logprobs: Sequence[TokenLogprob]
    ) -> bytes:
        """One event for each token that the client lacks. ``first`` is the index of ``ids[0]``."""
        events = []
        for offset in range(max(0, self._after + 1 - FIRST_TOKEN - first), len(ids)):
            index = first + offset
            events.append(
                b'id: %d\nevent: token\ndata: {"text":%b,"token_ids":[%d],"index":%d%b}\n\n'
                % (
                    FIRST_TOKEN + index,
                    _encode(texts[offset]),
                    ids[offset],
                    index,
                    _logprob(logprobs[offset]) if logprobs else b"",
                )
            )
        return b"".join(events)


def _start_data(task: Task) -> dict[str, object]:
    waited_ms = 1000 * (task.marks.started - task.marks.received)
    return {"task_id": task.id, "waited_ms": round(waited_ms, 3)}


def _metrics_data(task: Task, now: float, dropped: int) -> dict[str, object]:
    decoding_s = now - task.marks.first_token
    per_s = (task.completion_tokens - 1) / decoding_s if decoding_s > 0 else 0.0
    return {
        "completion_tokens": task.completion_tokens,
        "tokens_per_s": round(per_s, 1),
        "left_ms": round(task.deadline.left_ms(now), 1),
        "events_dropped": dropped,
    }


def ended(task: Task, ending: Ending) -> dict[str, object]:
    """The native API's fields of an ended task, without its error."""
    return {
        "outcome": ending.outcome,
        "finish_reason": ending.finish_reason,
        "usage": usage(task),
        "budget": {part: round(ms, 3) for part, ms in asdict(ending.budget).items()},
        **task_fields(task),
    }


def usage(task: Task) -> dict[str, int]:
    return {
        "prompt_tokens": task.prompt_tokens,
        "completion_tokens": task.completion_tokens,
        "total_tokens": task.prompt_tokens + task.completion_tokens,
    }


def _logprob(entry: TokenLogprob) -> bytes:
    top = [{"token_id": token_id, "logprob": logprob} for token_id, logprob in entry.top]
    return b',"logprob":%b,"top_logprobs":%b' % (_encode(entry.logprob), _encode(top))
