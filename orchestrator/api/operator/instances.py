"""``/v2/instances``: list, register, drain, swap and reload instances (OR-2)."""

import math
from typing import Any

from aiohttp import web

from orchestrator.api.http.body import read_body
from orchestrator.api.http.context import ORCHESTRATOR
from orchestrator.api.http.responses import json_response
from orchestrator.api.operator.types import (
    DrainRequest,
    RegisterRequest,
    ReloadRequest,
    SwapRequest,
    read_optional,
)
from orchestrator.instances.discovery import DiscoverySync
from orchestrator.instances.gates import describe_gates
from orchestrator.instances.instance import Instance
from orchestrator.instances.registry import Registry
from orchestrator.loading.swaps import RunningSwap, Swaps
from orchestrator.prediction.step_model import FIRST_TOKEN
from orchestrator.service import Orchestrator
from protocol import SwapReport

DISCOVERY = web.AppKey("discovery", DiscoverySync)
_OF_CARD = (
    *("model", "engine", "engine_reason", "engine_version", "engine_digest", "device"),
    *("quantization", "vram_bytes", "compute_capability", "device_mask", "tensor_parallel"),
    *("can_pause", "can_continue", "deterministic", "abort_ms", "context_tokens"),
)
"""An instance's facts from its card."""


async def listing(request: web.Request) -> web.Response:
    """List the current state of every instance, and the errors of instance sources."""
    orchestrator = request.app[ORCHESTRATOR]
    described = [_described(orchestrator, instance) for instance in orchestrator.registry]
    return json_response(
        {
            "snapshot_version": orchestrator.registry.snapshot_version,
            "instances": described,
            "sources": [
                {"source": source, "error": reason}
                for source, reason in request.app[DISCOVERY].errors.items()
            ],
        }
    )


async def status(request: web.Request) -> web.Response:
    """Show the current state of one instance."""
    orchestrator, (registry, address) = request.app[ORCHESTRATOR], _named(request)
    return json_response(_described(orchestrator, registry.named(address)))


async def register(request: web.Request) -> web.Response:
    """Register an instance for ``ttl_s`` seconds. Repeat the call to keep it longer. Idempotent."""
    asked = await read_body(request, RegisterRequest, lambda body: body)
    discovery = request.app[DISCOVERY]
    is_new = discovery.registered.register(asked.address, asked.ttl_s)
    await discovery.read(discovery.registered)
    answer = {"address": asked.address, "ttl_s": asked.ttl_s, "registered": True}
    return json_response(answer, status=201 if is_new else 200)


async def deregister(request: web.Request) -> web.Response:
    """Remove a registered instance. Its running jobs may finish. Idempotent."""
    address, discovery = request.match_info["address"], request.app[DISCOVERY]
    was_there = discovery.registered.deregister(address)
    await discovery.read(discovery.registered)
    return json_response({"address": address, "registered": False, "was_registered": was_there})


async def drain(request: web.Request) -> web.Response:
    """Send an instance no new work. Its running jobs finish or are moved. Idempotent."""
    asked = await read_optional(request, DrainRequest)
    grace_s = math.inf if asked.grace_s is None else asked.grace_s
    registry, address = _named(request)
    instance = registry.cordon(address, grace_s)
    await request.app[ORCHESTRATOR].sharing.cordoned(instance.address, grace_s)
    return json_response(describe(instance, registry), status=202)


async def undrain(request: web.Request) -> web.Response:
    """Send an instance work again. Idempotent."""
    registry, address = _named(request)
    instance = registry.uncordon(address)
    await request.app[ORCHESTRATOR].sharing.uncordoned(instance.address)
    return json_response(describe(instance, registry), status=202)


async def swap(request: web.Request) -> web.Response:
    """Load another model on an instance: 202 at once, or 200 at the end if the caller waits.
    Idempotent. Raises ``SwapFailed`` if the caller waits; else ``GET /v2/instances`` shows it."""
    asked = await read_body(request, SwapRequest, lambda body: body)
    settings, start = asked.for_worker(), request.app[ORCHESTRATOR].stages.swaps.start
    running = start(request.match_info["address"], settings, asked.grace_s)
    return await _told_of(running, wait=asked.wait)


async def reload(request: web.Request) -> web.Response:
    """Make an instance load its model from its files again. Answers and raises like a swap."""
    asked = await read_optional(request, ReloadRequest)
    load_again = request.app[ORCHESTRATOR].stages.swaps.reload
    running = load_again(request.match_info["address"], asked.grace_s)
    return await _told_of(running, wait=asked.wait)


async def _told_of(running: RunningSwap, *, wait: bool) -> web.Response:
    if wait:
        await running.wait()
    return json_response(describe_swap(running), status=200 if running.is_over else 202)


def describe_swap(swap: RunningSwap) -> dict[str, object]:
    """Progress or result of a swap that was requested here."""
    error = "" if swap.error is None else swap.error.message
    return _swap(swap.address, swap, swap.phase, swap.total_ms, error)


def _swap(
    address: str, of: RunningSwap | SwapReport, phase: str, total_ms: float, error: str
) -> dict[str, object]:
    return {
        "address": address,
        "model": of.model,
        "phase": phase,
        "ms": of.ms,
        "total_ms": round(total_ms, 1),
        "freed_mib": of.freed_mib,
        "error": error or None,
    }


def _named(request: web.Request) -> tuple[Registry, str]:
    return request.app[ORCHESTRATOR].registry, request.match_info["address"]


def describe(instance: Instance, registry: Registry) -> dict[str, object]:
    """An instance for operators. Values from its worker are null until it reports them."""
    card, stats = instance.card, instance.stats
    running = None if stats is None else stats.running
    breaker = registry.breakers.state(instance.address)
    return {
        "address": instance.address,
        "kind": instance.kind.value,
        **instance.describe_state(),
        "ready": instance.ready,
        "draining": instance.draining or instance.cordoned,
        "jobs": instance.lane_load + instance.clips_running,
        "leaving": instance.retiring_since is not None,
        "fault": instance.fault,
        "chat_fault": instance.chat_fault,
        "breaker": breaker.value,
        "load": instance.load,
        "lanes": {
            "open": sum(lane.is_open for lane in instance.lanes),
            "total": len(instance.lanes),
        },
        "adapters": [] if card is None else [one.name for one in card.adapters],
        "loadable": [] if card is None else sorted(one.name for one in card.loadable),
        "gates": describe_gates(instance, breaker),
        **{name: getattr(card, name, None) for name in _OF_CARD},
        "model_entry": instance.provenance.model_entry or None,
        "engine_entry": instance.provenance.engine_entry or None,
        "lacks": None if card is None else list(card.all_lacks),
        "slots_total": None if card is None else card.max_running,
        "slots_free": (
            None if card is None or running is None else max(0, card.max_running - running)
        ),
        "rows": {"most": None if card is None else instance.concurrency.slots},
        **_pace(instance),
        "kv_blocks_free": None if stats is None else stats.kv_blocks_free,
    }


def _described(orchestrator: Orchestrator, instance: Instance) -> dict[str, Any]:
    """An instance with the fields of rooms and its latest swap."""
    described: dict[str, Any] = describe(instance, orchestrator.registry)
    for room in orchestrator.rooms:
        described |= room.describe(instance.address)
    return described | {"swap": _latest_swap(orchestrator.stages.swaps, instance)}


def _latest_swap(swaps: Swaps, instance: Instance) -> dict[str, object] | None:
    """The latest swap that was requested here or that the instance's lanes report."""
    running, told = swaps.latest.get(instance.address), instance.swap
    if running is not None and (not running.is_over or told is None or told.model == running.model):
        return describe_swap(running)
    if told is None:
        return None
    return _swap(instance.address, told, told.phase.value, sum(told.ms.values()), told.error)


def _pace(instance: Instance) -> dict[str, object]:
    """Measured: the highest recent tokens/s. Predicted: the first token of a short prompt that is
    sent now, and the figures that predictions use."""
    if instance.step_learner is None or not instance.step_learner.model.known:
        return {"perf_tokens_per_s": None, "first_token_ms": None, "prediction": None}
    model = instance.step_learner.model
    return {
        "perf_tokens_per_s": round(model.tokens_per_s, 1) or None,
        "first_token_ms": round(model.finish_ms(FIRST_TOKEN, instance.occupancy), 2),
        "prediction": {"steps": model.steps, "spread": round(model.slow, 2)},
    }


def routes() -> list[web.RouteDef]:
    return [
        web.get("/v2/instances", listing),
        web.post("/v2/instances", register),
        web.get("/v2/instances/{address}", status),
        web.delete("/v2/instances/{address}", deregister),
        web.post("/v2/instances/{address}/drain", drain),
        web.post("/v2/instances/{address}/undrain", undrain),
        web.post("/v2/instances/{address}/swap", swap),
        web.post("/v2/instances/{address}/reload", reload),
    ]
