"""The gates of an instance's readiness (OR-13): artifacts, engine and health. A gate is open or has
a reason, so that an operator sees which part to repair. An instance takes new work if all of its
gates are open.
"""

from collections.abc import Mapping

from orchestrator.instances.breaker import BreakerState
from orchestrator.instances.instance import Instance, InstanceState

ARTIFACTS, ENGINE, HEALTH = "artifacts", "engine", "health"


def gates_of(instance: Instance, breaker: BreakerState) -> Mapping[str, str]:
    """Why each of an instance's gates is closed, empty if open; in the order in which they open."""
    return {
        ARTIFACTS: "" if instance.is_for_other_work else _lacks_artifacts(instance),
        ENGINE: "" if instance.is_for_other_work else _lacks_engine(instance),
        HEALTH: _lacks_health(instance, breaker),
    }


def describe_gates(instance: Instance, breaker: BreakerState) -> dict[str, object]:
    """An instance's gates in the form for answers."""
    gates = gates_of(instance, breaker)
    return {name: {"open": not why, "reason": why} for name, why in gates.items()}


def _lacks_artifacts(instance: Instance) -> str:
    """Why the model's files are not ready: not read by the worker, or an unusable card."""
    if instance.fault:
        return instance.fault
    if instance.announced_card is None:
        return instance.reason or "it has not reported its model"
    return ""


def _lacks_engine(instance: Instance) -> str:
    if not any(lane.is_open for lane in instance.lanes):
        return instance.reason or "no lane to it is open"
    if instance.fault:
        return "there is no engine without a usable model"
    if instance.is_reading_card or instance.encoder is None:
        return "its model's tokenizer is being prepared"
    if instance.swap is not None and instance.is_swapping and instance.draining:
        return f"it is about to serve {instance.swap.model} instead of {instance.swap.was}"
    return ""


def _lacks_health(instance: Instance, breaker: BreakerState) -> str:
    if instance.state is not InstanceState.UP and not instance.is_for_other_work:
        return instance.reason or instance.state.value
    if breaker is BreakerState.OPEN:
        return "its circuit breaker is open: too many of its jobs failed"
    if instance.removed or instance.retiring_since is not None:
        return "it is being removed: no source lists it any more"
    if instance.cordoned:
        return "an operator took it out of use"
    if instance.draining:
        return "it drains"
    return ""
