"""Metrics of how many slots wait and run."""

from clips.dispatch.service import Slots
from orchestrator.telemetry.metrics import Row

SLOTS: tuple[Row[Slots], ...] = (
    Row(
        "gauge",
        "slots_waiting",
        "slots",
        "Slots that wait for an instance",
        lambda slots: slots.waiting,
    ),
    Row(
        "gauge",
        "slots_running",
        "slots",
        "Slots that an instance has",
        lambda slots: slots.live - slots.waiting,
    ),
    Row(
        "gauge",
        "slot_bytes_kept",
        "bytes",
        "What ended slots and their files take",
        lambda slots: slots.store.total_bytes,
    ),
)
