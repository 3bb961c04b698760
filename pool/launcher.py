"""``tidegate up``: starts Triton instances and the orchestrator, keeps them up and ends them
together.

    launcher ─┬─ guardian ─ tritonserver ─ Python stub     one per instance, and one for its clips
              ├─ guardian ─ llama.cpp's server             one per instance instead, for a GGUF file
              ├─ guardian ─ python -m orchestrator         one
              └─ guardian ─ redis-server                   if several orchestrators have no store

Everything starts at once; the orchestrator's lanes connect when Triton is up. After that, a lost
process is restarted on its ports, so lanes reconnect to a Triton, and clients to the orchestrator.
A unit that keeps failing is given up. If the first start fails, everything ends with the reason. If
the last orchestrator or the last Triton is given up, everything ends, too.

"""

import asyncio
import contextlib
import errno
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from catalog.atomic import write_atomically
from catalog.errors import CatalogUnusable, GaveUp, StartFailed, StateFileUnusable
from catalog.operator_key import key_file
from catalog.paths import journal_file, log_dir
from pool.engines.ensure import ensure_triton, registered
from pool.engines.triton import PLAIN_TOKEN, TritonInstall, TritonPorts, require_guard
from pool.events import EventKind, PoolEvent
from pool.fleet.specs import InstanceSpec, LaunchSpec
from pool.fleet.units import PoolMachine
from pool.manager import Manager
from pool.process.logs import require_writable
from pool.process.ports import choose_ports, is_free
from pool.supervise import Supervised, cancelled
from pool.units import llamacpp
from pool.units.orchestrator import OrchestratorProcess
from pool.units.triton import TritonInstance

_PORT_ATTEMPTS = 5
_TOLD = (EventKind.READY, EventKind.LOST, EventKind.WARNED)
_U = TypeVar("_U")


class PoolLaunch:
    """One run of the launcher: a pool with its file in memory. Its processes end with it.
    ``on_event`` must return at once and never raise."""

    def __init__(self, spec: LaunchSpec, on_event: Callable[[PoolEvent], None]) -> None:
        self.spec = spec
        self._manager: Manager | None = None
        self._places: list[tuple[str, int]] = []
        """Hosts and ports that were chosen."""
        self._port = 0
        """Port of the orchestrators; 0 if there are none."""
        self._serving: set[str] = set()
        """Names of the units that have not been given up; empty until everything serves."""
        self._emit = on_event
        # A remote orchestrator could not know a token that is generated here.
        self._lane_token = spec.lane_token or (secrets.token_urlsafe(32) if spec.serve else "")

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set, then end everything. Raises ``ProvisionError``, with
        everything ended, when the service cannot continue."""
        self._require_guard()
        self._require_state_file()
        serving, stopping = asyncio.create_task(self._serve()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
        finally:
            await cancelled(serving, stopping)
            await self._end()

    def kill(self) -> None:
        """Cut the shutdown short: send SIGKILL to everything now."""
        if self._manager is not None:
            self._manager.kill()

    @property
    def instances(self) -> list[TritonInstance]:
        return self._units(TritonInstance)

    @property
    def url(self) -> str:
        """The address for clients: the orchestrator's, or the first Triton's if there is none."""
        orchestrators = self._units(OrchestratorProcess)
        return orchestrators[0].url if orchestrators else f"http://{self.instances[0].http_address}"

    @property
    def _members(self) -> list[Supervised]:
        return [] if self._manager is None else list(self._manager.members.values())

    def _units(self, kind: type[_U]) -> list[_U]:
        return [each.unit for each in self._members if isinstance(each.unit, kind)]

    # ── the life of a run ────────────────────────────────────────────────────────────────────

    async def _serve(self) -> None:
        install = await self._find_triton() if self._has_tritons else None
        began = time.monotonic()
        await self._start_all(install)
        self._write_state()
        self._emit(PoolEvent(EventKind.SERVING, "tidegate", self.url, time.monotonic() - began))
        self._serving = {each.name for each in self._members}
        register = [] if install is None else [self._register(install)]
        await _together(*register, *(self._kept(each) for each in self._members))

    async def _find_triton(self) -> TritonInstall:
        def fetching(what: str) -> None:
            self._emit(PoolEvent(EventKind.FETCHING, "triton", what))

        install = await ensure_triton(self.spec.triton, self.spec.home, fetching)
        self._emit(PoolEvent(EventKind.FOUND, "triton", install.description))
        return install

    async def _register(self, install: TritonInstall) -> None:
        """Register the server in the engine catalog, so that pools and people can refer to it."""
        try:
            await asyncio.to_thread(registered, self.spec.home, install)
        except (CatalogUnusable, OSError) as error:
            self._warn(f"the engine is not in the catalog: {error}")

    async def _start_all(self, install: TritonInstall | None) -> None:
        """Start all units. If a chosen port was taken, retry with other ports."""
        for attempts_left in reversed(range(_PORT_ATTEMPTS)):
            self._places = []
            specs = self.spec.instance_specs
            port = self._port = self._choose_port(specs) if self.spec.serve else 0
            instances = self._with_ports(specs, {port})
            manager = self._manager = self._make_manager(install, port or instances[0].ports.grpc)
            try:
                await self._start_units(manager, instances, port)
                return
            except StartFailed:
                await manager.stop(0.0)
                if not attempts_left or all(is_free(*place) for place in self._places):
                    raise
                self._emit(PoolEvent(EventKind.LOST, "tidegate", "another program took a port"))

    def _make_manager(self, install: TritonInstall | None, port: int) -> Manager:
        spec = self.spec
        host = spec.host if spec.serve else spec.triton_host
        logs = None if spec.log_to_stderr else log_dir(spec.home, host, port)
        if logs:
            require_writable(logs)
        machine = PoolMachine(
            install=install,
            state_dir=spec.home,
            logs=logs,
            lane_token=self._lane_token,
            warn=self._warn,
            sharing=lambda: spec.instances,
            model_repository=spec.model_repository,
        )
        return Manager(machine, self._told, drain_s=spec.drain_s, policy=spec.restart)

    async def _start_units(
        self, manager: Manager, instances: list[InstanceSpec], port: int
    ) -> None:
        spec = self.spec
        begun = [manager.add(each) for each in instances]
        if spec.serve:
            env = {"TIDEGATE_INSTANCES": ",".join(each.unit.address for each in begun)}
            self._renew_key(port)
            begun.append(manager.add(spec.orchestrator_spec(port, self._lane_token, env)))
        await self._serves(begun)

    async def _serves(self, begun: list[Supervised]) -> None:
        """Wait until units serve for the first time. Raises ``StartFailed``."""

        async def serves(member: Supervised) -> None:
            if reason := await member.first_outcome():
                raise StartFailed(reason)

        for each in begun:
            self._emit(PoolEvent(EventKind.STARTING, each.name))
        await _together(*map(serves, begun))

    def _told(self, event: PoolEvent) -> None:
        """Pass on an event of a unit, and save its new process ids after a restart."""
        if self._serving and event.kind is EventKind.READY:
            self._write_state()
        if event.kind in _TOLD:
            self._emit(event)

    async def _kept(self, member: Supervised) -> None:
        """Wait until a unit is given up, and go on without it. Raises ``GaveUp`` if it was the last
        of its kind."""
        reason = await member.given_up()
        self._serving.discard(member.name)
        alike = (each.name for each in self._members if type(each.unit) is type(member.unit))
        if self._serving.isdisjoint(alike):
            raise GaveUp(f"{reason}\nNothing can serve any more, so everything was ended")
        self._write_state()
        text = (
            f"{reason}\nIt is not restarted: fix the cause, then restart tidegate; still running: "
            f"{', '.join(sorted(self._serving))}"
        )
        self._emit(PoolEvent(EventKind.WARNED, member.name, text))

    async def _end(self) -> None:
        self._serving.clear()
        if self._manager is not None:
            began = time.monotonic()
            self._emit(PoolEvent(EventKind.ENDING, "tidegate"))
            await self._manager.stop(self.spec.drain_s)
            if self._port:
                self._remove_passing_state()
            self._emit(PoolEvent(EventKind.ENDED, "tidegate", seconds=time.monotonic() - began))
        if path := self.spec.state_file:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self._warn(f"cannot remove the state file {path}: {error.strerror}")

    # ── units ────────────────────────────────────────────────────────────────────────────────

    def _renew_key(self, port: int) -> None:
        """Remove the operators' key of an earlier run that was killed. Within this run, the key
        survives restarts."""
        path = key_file(self.spec.home, self.spec.host, port)
        with contextlib.suppress(OSError):  # the orchestrator reports the error
            path.unlink(missing_ok=True)

    def _remove_passing_state(self) -> None:
        """Remove the state of a port that was chosen for this run."""
        spec, port = self.spec, self._port
        if spec.port:
            return
        path = journal_file(spec.home, spec.host, port)
        for file in path.parent.glob(f"{path.name}*"):
            with contextlib.suppress(OSError):
                shutil.rmtree(file) if file.is_dir() else file.unlink()

    @property
    def _has_tritons(self) -> bool:
        return any(not _is_gguf(each) for each in self.spec.instance_specs)

    def _require_guard(self) -> None:
        """Raise ``PortsUnguarded`` if other machines could reach a Triton without a token."""
        spec = self.spec
        if self._has_tritons:
            require_guard(
                spec.triton_host,
                spec.models,
                lane_token=self._lane_token,
                plain_token=spec.worker_env.get(PLAIN_TOKEN, ""),
                is_open=spec.triton_open,
                opened_by="--triton-open",
            )

    def _choose_port(self, beside: list[InstanceSpec]) -> int:
        """The orchestrator's port: the requested one, or a free one."""
        host, asked = self.spec.host, {port for each in beside for port in each.ports}
        remedy = "choose another one: --port 9000 (make demo PORT=9000)"
        (port,) = choose_ports(host, [self.spec.port], remedy, but=asked)
        self._places.append((host, port))
        return port

    def _with_ports(self, specs: list[InstanceSpec], taken: set[int]) -> list[InstanceSpec]:
        """The instances with their requested ports, else with free ports not in ``taken``."""
        taken = taken.union(*(each.ports for each in specs))
        placed = []
        for each in specs:
            is_gguf = _is_gguf(each)
            host = llamacpp.HOST if is_gguf else each.host
            asked = each.ports[:1] if is_gguf else each.ports
            ports = choose_ports(host, asked, "give another one, or 0 for a free one", but=taken)
            taken.update(ports)
            self._places += [(host, port) for port in ports]
            placed.append(replace(each, ports=TritonPorts(*[*ports, 0, 0][:3])))
        return placed

    # ── the state file ───────────────────────────────────────────────────────────────────────

    def _require_state_file(self) -> None:
        """Raise ``StateFileUnusable`` if the state file cannot be written."""
        path = self.spec.state_file
        if path is None:
            return
        try:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            # Do not create the file itself: its readers would assume that the service is up.
            tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            raise StateFileUnusable(
                f"cannot write the state file {path}: {error.strerror}; "
                "give a file in an existing, writable directory: --state-file PATH"
            ) from error

    def _write_state(self) -> None:
        """Update the state file. If that fails, the service continues without it."""
        path = self.spec.state_file
        if path is None:
            return
        orchestrators = [each.pid for each in self._units(OrchestratorProcess)]
        state = {
            "url": self.url,
            "launcher_pid": os.getpid(),
            "orchestrator_pid": next(iter(orchestrators), None),
            "orchestrator_pids": orchestrators,
            "instances": [
                *(each.describe() for each in self.instances),
                *(each.describe() for each in self._units(llamacpp.LlamaCppServer)),
            ],
        }
        try:
            write_atomically(path, json.dumps(state, indent=2).encode(), 0o644)
        except OSError as error:
            self._warn(
                f"cannot write the state file {path}: {error.strerror}; continuing without it"
            )

    def _warn(self, text: str) -> None:
        self._emit(PoolEvent(EventKind.WARNED, "tidegate", text))


def _is_gguf(spec: InstanceSpec) -> bool:
    return spec.name.startswith("llamacpp")


async def _together(*work: Coroutine[Any, Any, None]) -> None:
    """Run all coroutines; if one raises, cancel and await the others, then raise its error."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancelled(*tasks)
