"""Metrics of how many slots wait and run."""

from clips.dispatch.service import Clips
from orchestrator.telemetry.metrics import Row

SLOTS: tuple[Row[Clips], ...] = (
    Row(
        "gauge",
        "slots_waiting",
        "slots",
        "Clips that wait for an instance",
        lambda slots: slots.waiting,
    ),
    Row(
        "gauge",
        "slots_running",
        "slots",
        "Clips that an instance has",
        lambda clips: len(clips.live) - clips.waiting,
    ),
    Row(
        "gauge",
        "slot_bytes_kept",
        "bytes",
        "What ended slots and their files take",
        lambda slots: slots.store.total_bytes,
    ),
)
