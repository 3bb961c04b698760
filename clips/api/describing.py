"""The slot model of an instance, as other routes of the service describe it."""

from clips.dispatch.fleet import ClipFleet
from clips.dispatch.job import MODEL, OUTPUTS
from clips.dispatch.wire import EVENT, RECIPE
from orchestrator.extension import PlainModel


def describe_instance(fleet: ClipFleet, address: str, *, briefly: bool) -> dict[str, object] | None:
    """An instance's slot model; None if it has none. ``briefly``: as far as people watch it. In
    full ``told`` is the model's own account of itself, None if it gives none."""
    instance = fleet.instances.get(address)
    if instance is None or not instance.heard_at:
        return None
    ability, told = instance.ability, instance.state
    described: dict[str, object] = {
        "state": instance.health.value,
        "ready": fleet.is_ready(instance),
        "reason": instance.reason,
        "slots_total": ability.slots,
        "slots_free": instance.free,
        "running": len(instance.attempts),
        "max_size": ability.max_size,
        "max_seconds": ability.max_seconds,
        "buffer_s": ability.buffer_s,
    }
    if not briefly:
        return described | {"told": told}
    stages = {} if told is None else told.stages
    return described | {
        "waiting": 0 if told is None else told.waiting,
        "p95_ms": {name: stage.p95_ms for name, stage in stages.items()},
        "memory_used_bytes": None if told is None else told.memory_used_bytes,
        "abort_to_free_p99_ms": None if told is None else told.abort_to_free_p99_ms,
    }


def describe_model(fleet: ClipFleet, name: str) -> PlainModel | None:
    """The slot model, if that is the ``name``."""
    if name != MODEL:
        return None
    outputs = {EVENT: "BYTES", **dict.fromkeys(OUTPUTS, "UINT8")}
    return PlainModel({RECIPE: "BYTES"}, outputs, bool(fleet.ready()))
