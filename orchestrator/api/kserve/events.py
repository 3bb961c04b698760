"""``generate_stream``: one event per frame with the text that it added, in Triton's shape."""

import msgspec

from orchestrator.api.http.event_stream import EventStream
from orchestrator.api.http.responses import task_fields
from orchestrator.api.kserve.errors import error_body
from orchestrator.api.kserve.outputs import Outputs
from orchestrator.tasks.task import Task
from protocol import Delta

_encode = msgspec.json.Encoder().encode


class PieceEvents:
    """Turns one task's tokens into events. Listens to the task; ``stream`` sends the events."""

    def __init__(self, stream: EventStream, outputs: Outputs) -> None:
        self._stream = stream
        self._outputs = outputs

    def started(self, task: Task) -> None:
        """Send nothing: the first byte is the first token's, so that errors can still be a
        status."""

    def tokens(self, task: Task, delta: Delta) -> None:
        piece = self._outputs.piece(task, "".join(delta.texts), delta.ids, delta.logprobs or ())
        self._stream.send(_event(self._outputs.head(task) | piece))

    def ended(self, task: Task) -> None:
        ending = task.ending
        assert ending is not None
        more = {"deadline_budget": str(ending.budget), **task_fields(task)}
        if ending.error is not None:
            if not self._stream.refuse(ending.error):
                self._stream.finish(_event(error_body(ending.error) | more))
            return
        piece = self._outputs.piece(task, ending.tail, (), (), ending.finish_reason.value)
        self._stream.finish(_event(self._outputs.head(task) | piece | more))


def _event(value: object) -> bytes:
    return b"data: %b\n\n" % _encode(value)
