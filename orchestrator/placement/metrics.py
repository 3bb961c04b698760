"""Counts of tasks placed, and of why they were placed there."""

from orchestrator.placement.placer import Placer
from orchestrator.placement.policy import Policy
from orchestrator.telemetry.metrics import Row

PLACEMENT: tuple[Row[Placer], ...] = (
    Row("counter", "placements", "tasks", "Tasks placed", lambda placer: placer.choices),
    Row(
        "counter",
        "placements_by_prefix",
        "tasks",
        "Tasks placed where some of the prompt was cached (OR-9)",
        lambda placer: placer.prefix_choices,
    ),
    Row(
        "counter",
        "placements_by_session",
        "tasks",
        "Tasks placed where their conversation was (OR-9)",
        lambda placer: placer.home_choices,
    ),
)

POLICY: tuple[Row[Policy], ...] = (
    Row(
        "counter",
        "placement_policy_fallbacks",
        "choices",
        "Choices that the operator's policy could not make (OR-8); only where one is set",
        lambda policy: [((reason,), count) for reason, count in policy.fallbacks.items()],
        ("reason",),
    ),
)
