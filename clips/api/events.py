"""A slot's events as server-sent events, live and replayed (OR-1).

Events are numbered: 0 is ``queued``, then come ``stage`` and ``preview`` as they happen, and one
terminal event, ``result`` or ``error``. A follower first replays what is kept, then listens to the
slot itself. Of each stage's previews only the last is kept, and a client that is behind gets none.
"""

import base64
from bisect import bisect_right
from collections.abc import Iterator
from operator import attrgetter

from clips.dispatch.job import OUTPUTS
from clips.dispatch.task import ClipTask, Progress
from orchestrator.api.native.events import NumberedEvents, error_object
from orchestrator.api.native.listing import standing
from orchestrator.tasks.ending import Ending

PIECE_EVENTS = 64
"""Events that are replayed in one piece."""

_number_of = attrgetter("number")


class ClipEvents(NumberedEvents):
    """Follows one slot on behalf of one client, from after event ``after``."""

    def replay(self, slot: ClipTask, position: int, predicted_ms: float | None) -> Iterator[bytes]:
        """Yield what has happened so far, in pieces; after the last one the slot is listened to."""
        queued = {
            "slot_id": slot.id,
            "queue_position": position,
            "predicted_ms": None if predicted_ms is None else round(predicted_ms, 1),
        }
        yield self._event(0, "queued", queued)
        sent = self._after
        while True:  # the slot goes on while a piece is being read
            first = bisect_right(slot.events, sent, key=_number_of)
            found = slot.events[first : first + PIECE_EVENTS]
            if not found:
                break
            sent = found[-1].number
            yield b"".join(map(self._spelled, found))
        if slot.ending is not None:
            self.ended(slot)
        else:
            slot.listen(self)

    # as a listener

    def progressed(self, event: Progress) -> None:
        if event.image is None:
            self._stream.send(self._spelled(event))
        else:
            self._stream.offer(self._spelled(event))

    def ended(self, slot: ClipTask) -> None:
        ending, number = slot.ending, slot.last_number
        assert ending is not None and number is not None
        kind = "result" if ending.error is None else "error"
        words: dict[str, object] = {} if ending.error is None else error_object(ending.error)
        data = words | {"slot_id": slot.id} | ended(slot, ending)
        data["outputs"] = outputs_of(slot)
        data["correlation_id"] = slot.job.correlation_id
        self._stream.finish(self._event(number, kind, data))

    # inside

    def _spelled(self, event: Progress) -> bytes:
        data: dict[str, object] = {"stage": event.stage, "percent": event.percent}
        if event.image is None:
            return self._event(event.number, "stage", data)
        data |= {"mime": "image/jpeg", "data": base64.b64encode(event.image).decode()}
        return self._event(event.number, "preview", data)


def ended(slot: ClipTask, ending: Ending) -> dict[str, object]:
    """The fields for a slot that has ended, except its error: the worker's facts, and the
    outcome."""
    return {**slot.facts, "outcome": ending.outcome, "instance": slot.instance or None}


def outputs_of(slot: ClipTask) -> dict[str, str]:
    """Paths at which a slot's files can be fetched, by output name."""
    return {name: f"/v2/slots/{slot.id}/outputs/{OUTPUTS[name].file}" for name in slot.files}


def described(slot: ClipTask, now: float) -> dict[str, object]:
    """A slot as one line of a list, without anything of its recipe."""
    return {"slot_id": slot.id, **standing(slot, now), "outputs": outputs_of(slot)}
