"""What the slot model says of itself: the answers to a request whose parameter ``watch`` is true.

Such a request carries an empty recipe and is answered with ``{"event": "state", …}``, a
``SlotState``, at once and every ``STATE_EVERY_S`` until it is cancelled.
"""

from typing import Final

import msgspec

STATE_EVERY_S: Final = 0.25
"""As often as a lane's heartbeat: silence for a second is suspect, for three it is gone."""


class StageState(msgspec.Struct, frozen=True):
    """One stage, as it was observed."""

    provider: str
    """Which one serves recipes that name none."""
    seconds_per_unit: float
    """What a unit of its work takes nearly always: the P95; before there is one, what warmed it up
    or else the target says."""
    p50_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    """Of finished stages; null before there is one."""
    finished: int = 0
    failed: int = 0
    others: dict[str, float] = {}
    """What a unit takes with each other provider that is loaded."""
    least: dict[str, float] | None = None
    """What a unit takes at the least with each provider: 0 where nothing was rendered by it of
    late, for then it may be any quick. Null: the model is older than this."""


class ResidentState(msgspec.Struct, frozen=True):
    """One line of the residency plan."""

    name: str
    bytes: int
    precision: str = ""


class AbortState(msgspec.Struct, frozen=True):
    """Slots that something stopped: how many, and how long until their buffers were free."""

    count: int
    p50_ms: float
    p99_ms: float


class SlotState(msgspec.Struct, frozen=True):
    """What an orchestrator must know to place clips and to refuse what cannot be in time."""

    max_size: int
    max_seconds: float
    """Of a clip: pixels of either side, and its length."""
    buffer_s: float
    """Kept back of each deadline for what comes behind the pipeline."""
    slots_total: int
    slots_free: int
    waiting: int
    max_waiting: int
    free_in_s: tuple[float, ...]
    """When each slot that is taken is expected to be free again."""
    stages: dict[str, StageState]
    """By ``audio``, ``image``, ``video``, ``clip``."""
    providers: dict[str, tuple[str, ...]]
    """Which a recipe may name, by stage."""
    residents: tuple[ResidentState, ...] = ()
    memory_used_bytes: int = 0
    memory_soft_bytes: int = 0
    memory_hard_bytes: int = 0
    """0: no limit."""
    abort_to_free_p50_ms: float | None = None
    abort_to_free_p99_ms: float | None = None
    """From a cancel or a deadline to the slot's buffers being free; null before there was one."""
    aborts: dict[str, AbortState] = {}
    """The same by cause: ``cancelled``, ``deadline``, ``timeout`` (of a stage)."""
    draining: bool = False
