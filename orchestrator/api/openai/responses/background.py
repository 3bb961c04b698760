"""Responses in the background: nobody has to wait for them, and several clients may follow one.

Whoever follows first hears what has happened so far, as a replay tells it, then each event as it
comes. A client that goes away, or does not keep up, changes nothing for the response.
"""

from collections.abc import Callable, Iterator, Mapping

import msgspec

from orchestrator.api.http.event_stream import EventStream
from orchestrator.api.http.outputs import TaskOutput
from orchestrator.api.openai.responses.answer import OutputCollector
from orchestrator.api.openai.responses.replay import CREATED, encoded_event, replay
from orchestrator.api.openai.responses.types import ParsedResponses
from orchestrator.api.openai.shapes import TokenOf
from orchestrator.service import Orchestrator
from orchestrator.tasks.job import Message
from orchestrator.tasks.task import Task
from protocol import Delta

_PIECE_BYTES = 64 * 1024
"""Most bytes of earlier events that a follower still has to read when it gets the first new
one."""


class BackgroundAnswer(OutputCollector):
    """Collects a task's output, and tells its events to whoever follows."""

    def __init__(
        self,
        asked: ParsedResponses,
        output: TaskOutput | None,
        token_of: TokenOf,
        keep: Callable[[Task, OutputCollector], None],
    ) -> None:
        super().__init__(asked, output, token_of, keep)
        self._followers: dict[EventStream, int] = {}
        """Streams, each with the number of the last event that its client has."""
        self._number = len(CREATED)
        """Number of the next event; those before it are the same for every response."""
        self._events: list[tuple[int, bytes]] = []
        """Numbered events that are to be sent together."""

    @property
    def last_number(self) -> int:
        """Number of the last event so far."""
        return self._number - 1

    def past(self, task: Task, after: int) -> bytes:
        """The events so far whose number is above ``after``."""
        body = self.body(task)
        if task.ending is None:
            body["status"] = "in_progress" if self._has_begun else "queued"
        return replay(msgspec.json.encode(body), self.pieces(), after)

    def join(self, stream: EventStream, after: int) -> None:
        """Send ``stream`` the events that come and whose number is above ``after``."""
        self._followers[stream] = after

    def leave(self, stream: EventStream) -> None:
        """Tell a stream no more. Idempotent."""
        self._followers.pop(stream, None)

    # as a listener

    def started(self, task: Task) -> None:
        super().started(task)
        self._begin(task, "in_progress")
        self._send()

    def tokens(self, task: Task, delta: Delta) -> None:
        super().tokens(task, delta)
        self._send()

    def ended(self, task: Task) -> None:
        self._begin(task, "in_progress")
        self._end(task)
        self._send()
        for stream in self._followers:
            stream.finish()

    # inside

    def _tell(self, kind: str, fields: Mapping[str, object]) -> None:
        if self._followers:
            self._events.append((self._number, encoded_event(kind, self._number, fields)))
        self._number += 1

    def _send(self) -> None:
        events, self._events = self._events, []
        for stream, after in self._followers.items():
            stream.send(b"".join(event for number, event in events if number > after))


class Background:
    """A response that is being made in the background, for the store and for its followers."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        task: Task,
        answer: BackgroundAnswer,
        history: tuple[Message, ...],
    ) -> None:
        self.history = history
        self._orchestrator = orchestrator
        self._task = task
        self._answer = answer

    def body(self) -> bytes:
        return msgspec.json.encode(self._answer.body(self._task))

    def cancel(self) -> None:
        self._orchestrator.cancel(self._task)

    def follow(self, stream: EventStream, after: int) -> Iterator[bytes]:
        # What has happened is looked at in the moment in which it is written, so that no later
        # event comes before it. While the client reads much of it, nothing is sent beside it.
        answer, task = self._answer, self._task
        while len(past := answer.past(task, after)) > _PIECE_BYTES and task.ending is None:
            after = max(after, answer.last_number)
            yield past
        if task.ending is None:
            answer.join(stream, after)
        else:
            stream.finish()
        yield past

    def leave(self, stream: EventStream) -> None:
        self._answer.leave(stream)
