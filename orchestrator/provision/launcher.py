"""``tidegate up``: Triton instances and the orchestrator, started, kept up and ended together.

    launcher ─┬─ guardian ─ tritonserver ─ Python stub     one per instance
              └─ guardian ─ python -m orchestrator

Everything starts at once; the orchestrator's lanes connect when Triton is there. After that each
half is restarted by itself when it is lost: a Triton keeps its ports, so lanes come back; the
orchestrator keeps its port, so clients do. A failure of the first start, or one that repeats,
ends everything with the reason.
"""

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from orchestrator.provision.errors import StartFailed
from orchestrator.provision.instance import TritonInstance
from orchestrator.provision.ports import free_ports, is_free, require_free
from orchestrator.provision.service import OrchestratorProcess
from orchestrator.provision.spec import PORT_STRIDE, EventKind, LaunchEvent, LaunchSpec
from orchestrator.provision.supervise import Unit, supervise
from orchestrator.provision.triton import TritonInstall, TritonPorts, TritonSpec, find_triton

_PORT_ATTEMPTS = 5


class Launcher:
    """One run. ``on_event`` must return at once and never raise."""

    def __init__(
        self,
        spec: LaunchSpec,
        on_event: Callable[[LaunchEvent], None],
        *,
        rng: random.Random | None = None,
    ) -> None:
        self.spec = spec
        self.instances: list[TritonInstance] = []
        self.orchestrator: OrchestratorProcess | None = None
        self._emit = on_event
        self._rng = rng or random.Random()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set, then end everything.

        Raises ``ProvisionError``, with everything ended, when the service cannot go on.
        """
        try:
            await _unless(stop, self._serve())
        finally:
            await self._end()

    def kill(self) -> None:
        """Cut the end short: SIGKILL to everything, now."""
        for unit in self._units:
            unit.kill()

    @property
    def url(self) -> str:
        """Where clients go: the orchestrator, or the first Triton when there is none."""
        if self.orchestrator is not None:
            return self.orchestrator.url
        return f"http://{self.instances[0].http_address}"

    @property
    def _units(self) -> list[Unit]:
        return [*self.instances, *([self.orchestrator] if self.orchestrator else [])]

    # ── the life of a run ────────────────────────────────────────────────────────────────────

    async def _serve(self) -> None:
        install = find_triton(self.spec.triton, self.spec.home)
        self._emit(LaunchEvent(EventKind.FOUND, "triton", install.description))
        began = time.monotonic()
        await self._start_all(install)
        self._write_state()
        self._emit(LaunchEvent(EventKind.SERVING, "tidegate", self.url, time.monotonic() - began))
        await _together(*(self._keep(unit) for unit in self._units))

    async def _start_all(self, install: TritonInstall) -> None:
        """Start every unit at once; again with other ports when a chosen one was taken."""
        for attempts_left in reversed(range(_PORT_ATTEMPTS)):
            self._make_units(install)
            try:
                await _together(*(self._start(unit) for unit in self._units))
                return
            except StartFailed:
                await self._stop_all(0.0)
                if not attempts_left or self._ports_are_free():
                    raise
                self._emit(LaunchEvent(EventKind.LOST, "tidegate", "a port was taken meanwhile"))

    async def _start(self, unit: Unit) -> None:
        began = time.monotonic()
        self._emit(LaunchEvent(EventKind.STARTING, unit.name))
        await unit.start()
        if isinstance(unit, OrchestratorProcess):
            await unit.wait_ready(self.spec.load_timeout_s)
        self._emit(LaunchEvent(EventKind.READY, unit.name, unit.where, time.monotonic() - began))

    async def _keep(self, unit: Unit) -> None:
        def on_lost(reason: str, pause_s: float) -> None:
            self._emit(LaunchEvent(EventKind.LOST, unit.name, reason, pause_s))

        def on_ready(seconds: float) -> None:
            self._write_state()
            self._emit(LaunchEvent(EventKind.READY, unit.name, unit.where, seconds))

        await supervise(unit, self.spec.restart, rng=self._rng, on_lost=on_lost, on_ready=on_ready)

    async def _end(self) -> None:
        if self._units:
            began = time.monotonic()
            self._emit(LaunchEvent(EventKind.ENDING, "tidegate"))
            await self._stop_all(self.spec.drain_s)
            self._emit(LaunchEvent(EventKind.ENDED, "tidegate", seconds=time.monotonic() - began))
        if self.spec.state_file:
            self.spec.state_file.unlink(missing_ok=True)

    async def _stop_all(self, drain_s: float) -> None:
        await asyncio.gather(*(unit.stop(drain_s) for unit in self._units))

    # ── what is started ──────────────────────────────────────────────────────────────────────

    def _make_units(self, install: TritonInstall) -> None:
        spec = self.spec
        ports = self._choose_ports()
        if spec.serve and spec.port:
            remedy = "choose another one: --port 9000 (make demo PORT=9000)"
            require_free(spec.host, spec.port, remedy)
        self.instances = [
            self._make_instance(install, index, ports[index]) for index in range(spec.instances)
        ]
        if spec.serve:
            self.orchestrator = OrchestratorProcess(
                spec.host,
                spec.port or free_ports(1, spec.host)[0],
                {
                    "TIDEGATE_INSTANCES": ",".join(each.grpc_address for each in self.instances),
                    "TIDEGATE_SHUTDOWN_GRACE_S": str(spec.drain_s),
                },
                log=self._log("orchestrator"),
            )

    def _make_instance(
        self, install: TritonInstall, index: int, ports: TritonPorts
    ) -> TritonInstance:
        spec = self.spec
        name = "triton" if spec.instances == 1 else f"triton-{index}"
        gpu = {"CUDA_VISIBLE_DEVICES": spec.gpus[index % len(spec.gpus)]} if spec.gpus else {}
        served = TritonSpec(
            spec.model_repository,
            spec.models,
            host=spec.triton_host,
            load_timeout_s=spec.load_timeout_s,
            env={**spec.worker_env, **gpu},
        )
        return TritonInstance(name, install, served, ports, log=self._log(name))

    def _choose_ports(self) -> list[TritonPorts]:
        """Ports of every instance: those asked for, free ones where none was."""
        spec, asked = self.spec, self.spec.triton_ports
        free = iter(free_ports(3 * spec.instances, spec.triton_host))

        def port(first: int, index: int) -> int:
            if not first:
                return next(free)
            number = first + PORT_STRIDE * index
            require_free(spec.triton_host, number, "give another one, or 0 for a free one")
            return number

        return [
            TritonPorts(port(asked.http, i), port(asked.grpc, i), port(asked.metrics, i))
            for i in range(spec.instances)
        ]

    def _ports_are_free(self) -> bool:
        """Whether nobody else has a port of ours; asked when nothing of ours runs."""
        places = [
            (self.spec.triton_host, port)
            for each in self.instances
            for port in (each.ports.http, each.ports.grpc, each.ports.metrics)
        ]
        if self.orchestrator is not None:
            places.append((self.orchestrator.host, self.orchestrator.port))
        return all(is_free(host, port) for host, port in places)

    def _log(self, name: str) -> Path | None:
        """A file in a directory by port, so that two services never share one."""
        if self.spec.log_to_stderr:
            return None
        port = self.spec.port or self.spec.triton_ports.grpc
        return self.spec.home / "logs" / str(port) / f"{name}.log"

    def _write_state(self) -> None:
        if self.spec.state_file is None:
            return
        state = {
            "url": self.url,
            "launcher_pid": os.getpid(),
            "orchestrator_pid": self.orchestrator.pid if self.orchestrator else None,
            "instances": [each.describe() for each in self.instances],
        }
        partial = self.spec.state_file.with_name(self.spec.state_file.name + ".partial")
        partial.write_text(json.dumps(state, indent=2))
        partial.replace(self.spec.state_file)


async def _together(*work: Coroutine[Any, Any, None]) -> None:
    """Run all; when one raises, cancel and await the others, then raise the same."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` until it ends or ``stop`` is set."""
    serving = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
    finally:
        for task in (serving, stopping):
            task.cancel()
        await asyncio.gather(serving, stopping, return_exceptions=True)
