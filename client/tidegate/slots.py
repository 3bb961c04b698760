"""Clips that the service renders from recipes, against deadlines.

::

    async with client.slots.stream("Good morning to everybody.", deadline=20_000) as events:
        async for event in events:
            if isinstance(event, SlotResult):
                clip = await client.slots.download(event.slot_id)
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypedDict, Unpack
from urllib.parse import quote

import msgspec

from tidegate.deadlines import Deadline, due
from tidegate.errors import ProtocolError
from tidegate.following import FollowedWork, Stream
from tidegate.requests import wire_options
from tidegate.results import TaskError
from tidegate.transport import HttpCall

SCHEMA: Final = "1.1"
"""Schema version of a recipe that does not state one."""
FILES: Final[Mapping[str, str]] = {"mp4": "clip.mp4", "wav": "speech.wav", "png": "portrait.png"}

Output = Literal["mp4", "wav", "png"]
Recipe = str | Mapping[str, Any]
"""A text to speak, or a whole recipe as in docs/slot.md."""


class SlotOptions(TypedDict, total=False):
    """Options of a slot other than its recipe; the service has a default for each."""

    model: str
    outputs: Sequence[Output]
    on_deadline: Literal["error", "degrade"]
    on_disconnect: Literal["cancel", "continue"]
    deadline: Deadline


class SlotSubmitted(msgspec.Struct, frozen=True, kw_only=True):
    """Answer for an accepted recipe. ``predicted_ms`` is the predicted time until it ends, and
    ``predicted_given_up`` names the parts that will probably be dropped for that."""

    slot_id: str
    status: str
    events_url: str = ""
    queue_position: int | None = None
    predicted_ms: float | None = None
    predicted_given_up: tuple[str, ...] = ()
    correlation_id: str = ""


class CheckScores(msgspec.Struct, frozen=True):
    """Scores of one model (``model``), one per keyframe."""

    model: str
    scores: tuple[float, ...] = ()


class SlotCheck(msgspec.Struct, frozen=True, kw_only=True):
    """How well the keyframes fit the portrait's prompt. A check marks the clip, never ends it."""

    passed: bool
    score: float | None = None
    models: tuple[CheckScores, ...] = ()
    outliers: tuple[Any, ...] = ()


class SlotFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a clip: sound, picture, time per stage (milliseconds), and dropped parts.

    ``outputs`` maps file names to their paths.
    """

    outcome: str | None = None
    seconds: float | None = None
    frames: int | None = None
    fps: int | None = None
    size: int | None = None
    given_up: tuple[str, ...] = ()
    check: SlotCheck | None = None
    deadline_met: bool | None = None
    audio_ms: float | None = None
    image_ms: float | None = None
    video_ms: float | None = None
    clip_ms: float | None = None
    total_ms: float | None = None
    outputs: dict[str, str] = {}


class SlotStatus(SlotFacts, frozen=True, kw_only=True):
    """A slot's state: ``queued``, ``dispatched``, ``running`` or ``ended``. ``stages`` has the
    progress of each stage in percent."""

    slot_id: str
    status: str
    queue_position: int | None = None
    predicted_ms: float | None = None
    stages: dict[str, int] = {}
    error: TaskError | None = None
    correlation_id: str = ""

    @property
    def ended(self) -> bool:
        return self.status == "ended"


class SlotLine(msgspec.Struct, frozen=True, kw_only=True):
    """One slot in a list, without its recipe. Times are milliseconds."""

    slot_id: str
    status: str
    correlation_id: str = ""
    age_ms: float = 0.0
    took_ms: float = 0.0
    left_ms: float = 0.0
    outcome: str | None = None
    code: str | None = None
    outputs: dict[str, str] = {}


class SlotList(msgspec.Struct, frozen=True):
    """Slots, newest first; ``has_more``: there are older ones."""

    slots: tuple[SlotLine, ...]
    has_more: bool = False


class SlotQueued(msgspec.Struct, frozen=True, kw_only=True):
    """Event: the slot was accepted. ``queue_position`` counts the slots before it."""

    slot_id: str = ""
    queue_position: int | None = None
    predicted_ms: float | None = None


class SlotStage(msgspec.Struct, frozen=True):
    """Event: ``audio``, ``image``, ``video`` or ``clip`` (the check) is ``percent`` done."""

    stage: str
    percent: int


class SlotResult(SlotFacts, frozen=True, kw_only=True):
    """Event: the clip is complete; the last event."""

    slot_id: str = ""


class SlotFailed(SlotFacts, frozen=True, kw_only=True):
    """Event: the slot ended without its clip. ``outputs`` may have a partial result."""

    code: str
    message: str
    slot_id: str = ""
    retryable: bool = False


SlotEvent = SlotQueued | SlotStage | SlotResult | SlotFailed

SLOT_EVENT_TYPES: Final[Mapping[str, type[SlotEvent]]] = {
    "queued": SlotQueued,
    "stage": SlotStage,
    "result": SlotResult,
    "error": SlotFailed,
}
"""Type of each event, by its name on the wire. A client ignores names that it does not know."""


class Slots(FollowedWork[SlotSubmitted, SlotEvent]):
    """Calls to render clips, available as ``Client.slots``."""

    _kind, _path = "slot", "/v2/slots"
    _submitted = SlotSubmitted
    _types = SLOT_EVENT_TYPES
    _ended, _failed = SlotResult, SlotFailed

    async def create(
        self, recipe: Recipe, *, idempotency_key: str | None = None, **options: Unpack[SlotOptions]
    ) -> SlotSubmitted:
        """Submit a recipe and return at once. Raises ``ApiError`` if it is refused.

        It is rendered only once, even if it is sent again, as with ``Client.submit``.
        """
        submission = _submission(recipe, options, idempotency_key)
        return await self._transport.call(submission, SlotSubmitted)

    async def get(self, slot_id: str) -> SlotStatus:
        """Get a slot's state. Raises ``NotFound``."""
        return await self._transport.get(self._path_of(slot_id), SlotStatus)

    async def list(self, *, status: str | None = None, limit: int = 100) -> SlotList:
        """List the slots of this client's key, newest first.

        ``status`` is ``queued``, ``dispatched``, ``running`` or ``ended``.
        """
        return await self._list(SlotList, status, limit)

    async def download(self, slot_id: str, output: str = "mp4") -> bytes:
        """Get a file of a slot: ``mp4``, ``wav`` or ``png``, if it was requested. Raises
        ``NotFound`` if it does not exist yet.
        """
        name = quote(FILES.get(output, output), safe="")
        path = f"{self._path_of(slot_id)}/outputs/{name}"
        return await self._transport.send(HttpCall("GET", path, ends_at=due().at))

    def stream(self, recipe: Recipe, **options: Unpack[SlotOptions]) -> Stream[SlotEvent]:
        """Submit a recipe and yield its events. A failed slot raises its ``ApiError``; the
        error's ``details`` are the fields of ``SlotFailed``.

        Leaving the stream early cancels the slot (see ``Stream``).
        """
        return self._stream(_submission(recipe, options))

    async def render(self, recipe: Recipe, **options: Unpack[SlotOptions]) -> SlotResult:
        """Submit a recipe and wait for the clip. Raises ``ApiError``."""
        async with self.stream(recipe, **options) as events:
            async for event in events:
                if isinstance(event, SlotResult):
                    return event
        raise ProtocolError("the stream ended without a terminal event")


def _submission(recipe: Recipe, options: SlotOptions, key: str | None = None) -> HttpCall:
    """Build the request of a recipe. Raises ``DeadlineExceeded``."""
    deadline = due(options.get("deadline"))
    body = wire_options(options, deadline)
    body["recipe"] = {
        "schema": SCHEMA,
        **({"text": recipe} if isinstance(recipe, str) else recipe),
    }
    headers = {"Idempotency-Key": key or uuid.uuid4().hex}
    return HttpCall("POST", Slots._path, body=body, headers=headers, ends_at=deadline.at)
