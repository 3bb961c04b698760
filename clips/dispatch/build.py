"""Builds and connects the parts that dispatch clips."""

from typing import Final

from clips.dispatch.fleet import ClipFleet
from clips.dispatch.ledger import FLEET, ClipLedger
from clips.dispatch.service import Clips, ClipsConfig
from clips.dispatch.task import ClipTask
from orchestrator.dispatch.retry import ATTEMPTS
from orchestrator.extension import Core
from orchestrator.prediction.metrics import refusals
from orchestrator.retention import KeptStore, Retention
from orchestrator.settings.derived import feasibility_config
from orchestrator.telemetry.metrics import MetricRow

CLIPS: tuple[MetricRow[Clips], ...] = (
    MetricRow(
        "gauge",
        "slots_waiting",
        "slots",
        "Clips that wait for an instance",
        lambda clips: clips.waiting,
    ),
    MetricRow(
        "gauge",
        "slots_running",
        "slots",
        "Clips that an instance has",
        lambda clips: len(clips.live) - clips.waiting,
    ),
)


KEPT: Final = Retention(keep_count=200, keep_s=600.0, keep_bytes=256 * 2**20)
"""Number of ended clips to keep, with their files, for late downloads."""


def build_clips(core: Core) -> Clips:
    """The clips of one orchestrator, not started yet."""
    settings, clock, metrics = core.settings, core.clock, core.metrics
    fleet = ClipFleet(
        core.registry, settings.lanes, clock, core.rng, is_watching=not core.is_simulated
    )

    def enter(clip: ClipTask) -> None:
        core.admission.begin(clip)
        core.limiter.begin(clip)

    clips = Clips(
        enter,
        fleet,
        ClipLedger(metrics, clock),
        KeptStore(clock, KEPT, "slot"),
        ClipsConfig(
            feasibility_config(settings),
            attempts=ATTEMPTS,
            lane=settings.lanes,
            tag=core.sharing.tag,
        ),
        clock,
        core.rng,
    )
    metrics.watch(clips, CLIPS)
    metrics.keeps("slots", clips.store.kept)
    metrics.watch(clips.refusals, refusals("slot_", "slots"))
    metrics.watch(fleet, FLEET)
    return clips
