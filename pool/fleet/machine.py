"""Gives the manager this machine as it needs it (``manager.Machine``)."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from catalog.errors import ProvisionError
from pool.artifacts.resolve import resolve_model
from pool.engines.triton import TritonPorts
from pool.fleet.beside import PoolOrchestrator
from pool.fleet.home import InstanceRecord
from pool.fleet.llamacpp import SERVER, PoolLlamaCpp
from pool.fleet.member import OnStep, PoolUnit, ports_of
from pool.fleet.specs import ORCHESTRATOR, AnySpec, InstanceSpec, OrchestratorSpec
from pool.fleet.triton import PoolTriton, TritonHost, former
from pool.process.detached import Found, clear_remains, find_detached
from pool.units.llamacpp import is_asked_for


class PoolMachine:
    """Makes units of real processes, and finds those that run."""

    def __init__(self, host: TritonHost) -> None:
        self.host = host

    def found(self) -> Sequence[Found]:
        found = find_detached(self.host.home.path)
        clear_remains(self.host.home.path, found)
        return found

    def make(self, spec: AnySpec, kept: InstanceRecord | None, on_step: OnStep) -> PoolUnit:
        ports = (0, 0, 0) if kept is None else kept.ports
        if isinstance(spec, OrchestratorSpec):
            return self._beside(spec, ports[0], on_step)
        if (model := self._gguf_of(spec)) is not None:
            return PoolLlamaCpp(self.host, spec, model, ports[0], on_step)
        return PoolTriton(self.host, spec, TritonPorts(*ports), on_step)

    def make_former(self, found: Found, on_step: OnStep) -> PoolUnit:
        if found.label.facts.get("server") == SERVER:
            gone = InstanceSpec(found.label.unit, model="")
            return PoolLlamaCpp(self.host, gone, Path(), 0, on_step)
        if found.label.unit != ORCHESTRATOR:
            return former(found, self.host, on_step)
        port = ports_of(found)[0]
        host = found.label.facts.get("host", "127.0.0.1")
        return self._beside(OrchestratorSpec(host, port, {}, 0.0), port, on_step)

    async def fits_beside(self, spec: AnySpec) -> bool:
        if isinstance(spec, OrchestratorSpec):
            return False
        try:
            model = await asyncio.to_thread(resolve_model, spec.model, self.host.state_dir)
        except ProvisionError:
            return True  # it will fail to start, with the reason, and the old one stays
        return await self.host.gpus.fits_beside(spec, model)

    def _gguf_of(self, spec: InstanceSpec) -> Path | None:
        """The model of an instance that llama.cpp's server is to run; None for a Triton, which
        says what is wrong with a model that is not there."""
        try:
            model = resolve_model(spec.model, self.host.state_dir)
        except ProvisionError:
            return None
        return model if is_asked_for(spec.settings, model) else None

    def _beside(self, spec: OrchestratorSpec, kept_port: int, on_step: OnStep) -> PoolOrchestrator:
        host = self.host
        return PoolOrchestrator(
            host.home, spec, kept_port, host.lane_token, on_step, host.heartbeat_s, host.warn
        )


def on_cpu(specs: Mapping[str, AnySpec]) -> int:
    """How many instances share this machine's memory."""
    return sum(isinstance(spec, InstanceSpec) and not spec.on_gpu for spec in specs.values())
