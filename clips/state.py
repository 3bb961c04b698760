"""The slot model's state, which answers a request whose parameter ``watch`` is true.

Such a request carries an empty recipe and is answered with ``{"event": "state", …}``, a
``ClipsState``, at once and every ``STATE_EVERY_S`` until it is cancelled.
"""

from typing import Final

import msgspec

STATE_EVERY_S: Final = 0.25
"""Seconds between states, as for a lane's heartbeat: silence is suspect after one second; after
three the model counts as gone."""


class StageState(msgspec.Struct, frozen=True):
    """Observed times of one stage."""

    provider: str
    seconds_per_unit: float
    """Seconds that a unit of its work rarely exceeds: the P95; before there is one, an estimate by
    the warm-up or else the target."""
    p95_ms: float | None = None
    """Percentile of finished runs; null before there is one."""
    least: float | None = None
    """Least seconds per unit; 0 where nothing was rendered recently, as it may then be arbitrarily
    fast. Null from a model older than this field."""


class AbortState(msgspec.Struct, frozen=True):
    """Clips that were stopped: how many, and how long until their buffers were free."""

    count: int
    p50_ms: float
    p99_ms: float


class ClipsState(msgspec.Struct, frozen=True):
    """State that an orchestrator needs to place clips, and to refuse those sure to be late."""

    max_size: int
    max_seconds: float
    """Most seconds of a clip; ``max_size`` is the most pixels of either side."""
    buffer_s: float
    """Seconds of each deadline kept back for what comes after the pipeline."""
    slots_total: int
    slots_free: int
    waiting: int
    max_waiting: int
    free_in_s: tuple[float, ...]
    """Seconds until each slot that is taken is expected to be free again."""
    stages: dict[str, StageState]
    """Stages by name: ``audio``, ``image``, ``video``, ``clip``."""
    memory_used_bytes: int = 0
    abort_to_free_p50_ms: float | None = None
    abort_to_free_p99_ms: float | None = None
    """Time from a cancel or deadline until the clip's buffers are free; null before one."""
    aborts: dict[str, AbortState] = {}
    """Stopped clips by cause: ``cancelled``, ``deadline``, ``timeout`` (of a stage)."""
    draining: bool = False
