"""The gates of an instance's readiness (OR-13): artifacts, engine and health. Each gate is open or
says why not, so that an operator sees which part to repair. An instance takes new work when all of
its gates are open.
"""

from dataclasses import dataclass

from orchestrator.instances.breaker import BreakerState
from orchestrator.instances.instance import Instance, InstanceState

ARTIFACTS, ENGINE, HEALTH = "artifacts", "engine", "health"


@dataclass(frozen=True, slots=True)
class Gate:
    """A part of an instance's readiness. ``reason`` is for people, and empty while the gate is
    open."""

    reason: str = ""

    @property
    def is_open(self) -> bool:
        return not self.reason


def gates_of(instance: Instance, breaker: BreakerState) -> dict[str, Gate]:
    """An instance's gates, in the order in which they open."""
    return {
        ARTIFACTS: Gate("" if instance.is_for_other_work else _lacks_artifacts(instance)),
        ENGINE: Gate("" if instance.is_for_other_work else _lacks_engine(instance)),
        HEALTH: Gate(_lacks_health(instance, breaker)),
    }


def _lacks_artifacts(instance: Instance) -> str:
    """Why the model's files are not ready: not read by the worker, or not in a usable card. Empty
    if ready."""
    if instance.fault:
        return instance.fault
    if instance.announced_card is None:
        return instance.reason or "it has not reported which model it serves"
    return ""


def _lacks_engine(instance: Instance) -> str:
    if not any(lane.is_open for lane in instance.lanes):
        return instance.reason or "no lane to it is open"
    if instance.fault:
        return "no engine without a model that can be used"
    if instance.is_reading_card or instance.encoder is None:
        return "its model's tokenizer is being made ready"
    if instance.swap is not None and instance.is_swapping and instance.draining:
        return f"it is about to serve {instance.swap.model} instead of {instance.swap.was}"
    return ""


def _lacks_health(instance: Instance, breaker: BreakerState) -> str:
    if instance.state is not InstanceState.UP and not instance.is_for_other_work:
        return instance.reason or instance.state.value
    if breaker is BreakerState.OPEN:
        return "its circuit breaker is open: too many of its jobs failed"
    if instance.removed or instance.retiring_since is not None:
        return "it is being removed: no list of instances names it any more"
    if instance.cordoned:
        return "an operator took it out of use"
    if instance.draining:
        return "it drains"
    return ""
