"""``tidegate up``: starts Triton instances and the orchestrator, keeps them up and ends them
together.

    launcher ─┬─ guardian ─ tritonserver ─ Python stub     one per instance, and one for its clips
              ├─ guardian ─ llama.cpp's server             one per instance instead, for a GGUF file
              ├─ guardian ─ python -m orchestrator         one, or several that share the port
              └─ guardian ─ redis-server                   where several have no store yet

Everything starts at once; the orchestrator's lanes connect when Triton is there. After that each
half is restarted by itself when it is lost: a Triton keeps its ports, so lanes come back; the
orchestrator keeps its port, so clients do. What keeps failing is given up by itself. A failure of
the first start ends everything with the reason, as does the last orchestrator, or the last Triton,
that keeps failing.

``tidegate serve --processes N`` is the same without Tritons.
"""

import asyncio
import contextlib
import errno
import json
import os
import random
import secrets
import shutil
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from catalog.atomic import write_atomically
from catalog.errors import CatalogUnusable, GaveUp, StartFailed, StateFileUnusable
from catalog.operator_key import keep_key, key_file
from catalog.paths import JOURNAL_BY_DEFAULT, journal_file, log_dir, store_dir
from orchestrator.tls import SETTING, spell_tls
from pool.engines.triton import TritonInstall, TritonPorts, TritonSpec
from pool.engines.triton_fetch import ensure_triton
from pool.engines.triton_provider import registered
from pool.events import EventKind, PoolEvent
from pool.guard import PLAIN_TOKEN, require_guard
from pool.preflight import cpu
from pool.process.logs import require_writable
from pool.process.ports import free_ports, is_free, require_free
from pool.spec import PORT_STRIDE, SLOT_MODEL, LaunchSpec
from pool.supervise import Supervised, Unit
from pool.units import llamacpp
from pool.units.llamacpp import LlamaCppServer, LlamaCppSpec
from pool.units.orchestrator import Address, OrchestratorProcess
from pool.units.store import StoreProcess
from pool.units.triton import TritonInstance
from worker.settings import SHARED_BY

_PORT_ATTEMPTS = 5


class Launcher:
    """One run of the launcher. ``on_event`` must return at once and never raise."""

    def __init__(
        self,
        spec: LaunchSpec,
        on_event: Callable[[PoolEvent], None],
    ) -> None:
        self.spec = spec
        self.instances: list[TritonInstance] = []
        self.gguf_servers: list[LlamaCppServer] = []
        self.orchestrators: list[OrchestratorProcess] = []
        self.store: StoreProcess | None = None
        self._supervised: list[Supervised] = []
        self._serving: set[str] = set()
        """Names of the units that have not been given up; empty until everything serves."""
        self._emit = on_event
        self._rng = random.Random()
        # An orchestrator elsewhere could not know a token that is made up here.
        self._lane_token = spec.lane_token or (secrets.token_urlsafe(32) if spec.serve else "")

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set, then end everything.

        Raises ``ProvisionError``, with everything ended, when the service cannot go on.
        """
        self._require_guard()
        self._require_state_file()
        try:
            await _unless(stop, self._serve())
        finally:
            await self._end()

    def reload(self) -> None:
        """Have all orchestrators read their settings anew."""
        for each in self.orchestrators:
            each.reload()

    def kill(self) -> None:
        """Cut the end short: SIGKILL to everything, now."""
        for each in self._supervised:
            each.kill()

    @property
    def orchestrator(self) -> OrchestratorProcess | None:
        """The orchestrator, the first one of several; None if there is none."""
        return self.orchestrators[0] if self.orchestrators else None

    @property
    def url(self) -> str:
        """The address for clients: the orchestrator's, or the first Triton's if there is none."""
        if self.orchestrator is not None:
            return self.orchestrator.url
        return f"http://{self.instances[0].http_address}"

    # ── the life of a run ────────────────────────────────────────────────────────────────────

    async def _serve(self) -> None:
        install = await self._find_triton() if self._servers else None
        if install is not None:
            self._emit(PoolEvent(EventKind.FOUND, "triton", install.description))
        self._tell_cores()
        began = time.monotonic()
        await self._start_all(install)
        self._write_state()
        self._emit(PoolEvent(EventKind.SERVING, "tidegate", self.url, time.monotonic() - began))
        self._serving = {each.name for each in self._supervised}
        beside = [] if install is None else [self._register(install)]
        await _together(*beside, *(self._kept(each) for each in self._supervised))

    def _tell_cores(self) -> None:
        """Say how many processes there are for this machine's cores, where that was chosen."""
        count, cores = self.spec.processes, cpu.look().cores
        if count > 1:
            event = PoolEvent(
                EventKind.SIZED, "orchestrators", f"{count} processes on {cores:g} cores"
            )
            self._emit(event)
        if count > max(1.0, cores):
            self._warn("there are more orchestrator processes than cores: they add nothing")

    async def _register(self, install: TritonInstall) -> None:
        """Put the server into the catalog of engines, for placements and people to name it."""
        try:
            await asyncio.to_thread(registered, self.spec.home, install)
        except (CatalogUnusable, OSError) as error:
            self._warn(f"the engine is not in the catalog: {error}")

    async def _find_triton(self) -> TritonInstall:
        def fetching(what: str) -> None:
            self._emit(PoolEvent(EventKind.FETCHING, "triton", what))

        return await ensure_triton(self.spec.triton, self.spec.home, fetching)

    async def _start_all(self, install: TritonInstall | None) -> None:
        """Start every unit at once, behind the store; again with other ports if a chosen one was
        taken."""
        for attempts_left in reversed(range(_PORT_ATTEMPTS)):
            self._make_units(install)
            try:
                if self.store is not None:
                    await self._start(self.store)
                await self._start(*self.instances, *self.gguf_servers, *self.orchestrators)
                return
            except StartFailed:
                await self._stop_all(0.0)
                if not attempts_left or self._ports_are_free():
                    raise
                self._emit(PoolEvent(EventKind.LOST, "tidegate", "a port was taken meanwhile"))

    async def _start(self, *units: Unit) -> None:
        """Start units at once, and keep them up from then on. Raises ``StartFailed``."""
        begun = [Supervised(each, self._told, self._rng, self.spec.restart) for each in units]
        self._supervised += begun
        for each in begun:
            self._emit(PoolEvent(EventKind.STARTING, each.name))
            each.begin()
        await _together(*(_serves(each) for each in begun))

    def _told(self, event: PoolEvent) -> None:
        """Pass an event of a unit on; the process ids of one that came back are new."""
        if self._serving and event.kind is EventKind.READY:
            self._write_state()
        self._emit(event)

    async def _kept(self, supervised: Supervised) -> None:
        reason = await supervised.given_up()
        self._serving.discard(supervised.name)
        if self._was_last(supervised.unit):
            raise GaveUp(f"{reason}\nNothing is left that serves, so everything was ended")
        self._write_state()
        text = (
            f"{reason}\nIt is not started again, to have it back mend what ended it and start "
            f"everything anew; what goes on: {', '.join(sorted(self._serving))}"
        )
        self._emit(PoolEvent(EventKind.WARNED, supervised.name, text))

    def _was_last(self, unit: Unit) -> bool:
        """Whether nothing can be served without a unit that was given up. Without a store
        orchestrators go on, each for itself."""
        alike = [each for each in self._supervised if type(each.unit) is type(unit)]
        return unit is not self.store and not any(each.name in self._serving for each in alike)

    async def _end(self) -> None:
        self._serving.clear()
        if self._supervised:
            began = time.monotonic()
            self._emit(PoolEvent(EventKind.ENDING, "tidegate"))
            await self._stop_all(self.spec.drain_s)
            self._remove_passing_state()
            self._emit(PoolEvent(EventKind.ENDED, "tidegate", seconds=time.monotonic() - began))
        self._remove_state()

    async def _stop_all(self, drain_s: float) -> None:
        """End every unit, the store last: the orchestrators write to it until their end."""
        served = [each for each in self._supervised if each.unit is not self.store]
        await asyncio.gather(*(each.end(drain_s) for each in served))
        await asyncio.gather(*(e.end(drain_s) for e in self._supervised if e not in served))

    # ── what is started ──────────────────────────────────────────────────────────────────────

    def _make_units(self, install: TritonInstall | None) -> None:
        spec = self.spec
        port = self._choose_port() if spec.serve else 0
        ports = self._choose_ports(port)
        host = spec.host if spec.serve else spec.triton_host
        logs = None if spec.log_to_stderr else log_dir(spec.home, host, port or ports[0].grpc)
        if logs:
            require_writable(logs)
        self._supervised = []
        self.instances = []
        if install is not None:
            self.instances = [
                self._make_instance(install, server, its_ports, logs)
                for server, its_ports in zip(self._servers, ports, strict=True)
            ]
        self.gguf_servers = self._make_gguf_servers({port, *chain(*ports)}, logs)
        if spec.store:
            folder = store_dir(spec.home, spec.host, port)
            log = logs and logs / "store.log"
            self.store = StoreProcess(spec.store, folder, log=log, warn=self._warn)
        if spec.serve:
            self._renew_key(port)
            self.orchestrators = self._make_orchestrators(port, ports, logs)

    def _renew_key(self, port: int) -> None:
        """Remove the operators' key of an earlier run that was killed; within this run a key
        outlives restarts. Several processes take up one that is made here."""
        path = key_file(self.spec.home, self.spec.host, port)
        with contextlib.suppress(OSError):  # the orchestrator says what it cannot do without it
            path.unlink(missing_ok=True)
            if self.spec.processes > 1:
                keep_key(path)

    def _make_orchestrators(
        self, port: int, taken: list[TritonPorts], logs: Path | None
    ) -> list[OrchestratorProcess]:
        spec, env = self.spec, self._environment(port)
        but = {port, *chain(*taken)}
        shares = spec.processes > 1
        own_ports = free_ports(spec.processes, spec.own_host, but) if shares else [0]
        made = []
        for number, own_port in enumerate(own_ports):
            if spec.advertise:
                env = {**env, "TIDEGATE_STATE__ADVERTISE": f"{spec.advertise}:{own_port}"}
            name = f"orchestrator-{number}.log" if shares else "orchestrator.log"
            log = logs and logs / name
            each = OrchestratorProcess(spec.host, port, env, log=log, warn=self._warn)
            if shares:
                each.share_port(number, Address(spec.own_host, own_port))
            if spec.instances_at is None:
                each.ready_within_s = spec.load_timeout_s
            made.append(each)
        return made

    def _environment(self, port: int) -> dict[str, str]:
        """Variables of the orchestrators."""
        spec = self.spec
        env = {
            "TIDEGATE_SHUTDOWN__GRACE_S": str(spec.drain_s),
            "TIDEGATE_HOME": str(spec.home),
            **({"TIDEGATE_STATE__URL": self.store.url} if self.store is not None else {}),
        }
        if spec.instances_at is not None:
            return env | ({"TIDEGATE_INSTANCES": spec.instances_at} if spec.instances_at else {})
        if SLOT_MODEL in spec.models:
            env["TIDEGATE_SLOTS__SERVE"] = "true"
        return env | {
            "TIDEGATE_INSTANCES": ",".join(
                [each.grpc_address for each in self.instances]
                + [each.address for each in self.gguf_servers]
            ),
            "TIDEGATE_LANES__TOKEN": self._lane_token,
            SETTING: spell_tls(spec.tls),
            JOURNAL_BY_DEFAULT: str(self._journal(port)),
        }

    @property
    def _servers(self) -> list["_Server"]:
        """The Tritons to start. Each has a single model if an orchestrator is in front: two models
        in one Triton end together when the process of either crashes."""
        spec = self.spec
        if spec.instances_at is not None:
            return []
        kinds = [("triton", spec.models)]
        if spec.serve and SLOT_MODEL in spec.models and len(spec.models) > 1:
            text = tuple(model for model in spec.models if model != SLOT_MODEL)
            kinds = [("triton", text), ("slots", (SLOT_MODEL,))]
        if spec.runs_gguf:
            kinds = [(name, models) for name, models in kinds if models == (SLOT_MODEL,)]
        return [
            _Server(name if spec.instances == 1 else f"{name}-{index}", models, index)
            for name, models in kinds
            for index in range(spec.instances)
        ]

    def _make_instance(
        self, install: TritonInstall, server: "_Server", ports: TritonPorts, logs: Path | None
    ) -> TritonInstance:
        spec, name = self.spec, server.name
        gpu = {"CUDA_VISIBLE_DEVICES": self._gpus_of(server.index)} if spec.gpus else {}
        served = TritonSpec(
            spec.model_repository,
            server.models,
            host=spec.triton_host,
            load_timeout_s=spec.load_timeout_s,
            env={SHARED_BY: str(spec.instances), **spec.worker_env, **gpu},
            lane_token=self._lane_token,
            tls=spec.tls,
        )
        log = logs and logs / f"{name}.log"
        return TritonInstance(name, install, served, ports, log=log, warn=self._warn)

    def _make_gguf_servers(self, taken: set[int], logs: Path | None) -> list[LlamaCppServer]:
        spec = self.spec
        if not spec.runs_gguf or spec.models == (SLOT_MODEL,):
            return []
        made = []
        for index, port in enumerate(free_ports(spec.instances, llamacpp.HOST, taken)):
            name = "llamacpp" if spec.instances == 1 else f"llamacpp-{index}"
            gpu = {"CUDA_VISIBLE_DEVICES": self._gpus_of(index)} if spec.gpus else {}
            served = LlamaCppSpec(spec.worker_env, spec.home, spec.load_timeout_s, gpu)
            log = logs and logs / f"{name}.log"
            made.append(LlamaCppServer(name, served, port, log=log, warn=self._warn))
        return made

    def _gpus_of(self, index: int) -> str:
        """The GPUs of an instance, as CUDA is told them."""
        spec, each = self.spec, self.spec.gpus_each
        groups = [spec.gpus[at : at + each] for at in range(0, len(spec.gpus), each)]
        return ",".join(groups[index % len(groups)])

    def _journal(self, port: int) -> Path:
        return journal_file(self.spec.home, self.spec.host, port)

    def _remove_passing_state(self) -> None:
        """Remove what is kept for a port chosen for this run, where nobody comes back for it, and
        the operators' key of several processes, each of which leaves it to the others."""
        if self.orchestrator is None:
            return
        if self.spec.processes > 1:
            with contextlib.suppress(OSError):
                key_file(self.spec.home, self.spec.host, self.orchestrator.port).unlink(
                    missing_ok=True
                )
        if self.spec.port:
            return
        if self.store is not None:
            self.store.forget()
        path = self._journal(self.orchestrator.port)
        for file in path.parent.glob(f"{path.name}*"):
            with contextlib.suppress(OSError):
                if file.is_dir():
                    shutil.rmtree(file)
                else:
                    file.unlink()

    def _require_guard(self) -> None:
        """Raise ``PortsUnguarded`` if others could reach a Triton that asks for no token."""
        spec = self.spec
        if not self._servers:
            return
        require_guard(
            spec.triton_host,
            spec.models,
            lane_token=self._lane_token,
            plain_token=spec.worker_env.get(PLAIN_TOKEN, ""),
            is_open=spec.triton_open,
            opened_by="--triton-open",
        )

    def _choose_port(self) -> int:
        """The orchestrator's port: the one asked for, or a free one."""
        spec = self.spec
        if not spec.port:
            return free_ports(1, spec.host, self._asked_ports())[0]
        remedy = "choose another one: --port 9000 (make demo PORT=9000)"
        require_free(spec.host, spec.port, remedy)
        return spec.port

    def _asked_ports(self) -> set[int]:
        """The ports of all Tritons that were asked for."""
        servers = range(len(self._servers))
        firsts = filter(None, self.spec.triton_ports)
        return {first + PORT_STRIDE * place for first in firsts for place in servers}

    def _choose_ports(self, taken: int) -> list[TritonPorts]:
        """Ports of every server: the ones asked for, otherwise free ones, but not ``taken``."""
        spec, asked = self.spec, self.spec.triton_ports
        servers = range(len(self._servers))
        free = iter(free_ports(3 * len(servers), spec.triton_host, {taken, *self._asked_ports()}))

        def port(first: int, place: int) -> int:
            if not first:
                return next(free)
            number = first + PORT_STRIDE * place
            require_free(spec.triton_host, number, "give another one, or 0 for a free one")
            return number

        return [TritonPorts(*(port(first, i) for first in asked)) for i in servers]

    def _ports_are_free(self) -> bool:
        """Whether no other program has a port of ours; to be asked when nothing of ours runs."""
        places = [(self.spec.triton_host, port) for each in self.instances for port in each.ports]
        places += [(llamacpp.HOST, each.port) for each in self.gguf_servers]
        for each in self.orchestrators:
            places += [(each.host, each.port), each.asked_at]
        return all(is_free(host, port) for host, port in places)

    # ── the state file ───────────────────────────────────────────────────────────────────────

    def _require_state_file(self) -> None:
        """Raise ``StateFileUnusable`` if the state file cannot be written."""
        path = self.spec.state_file
        if path is None:
            return
        try:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            partial = _partial(path)
            partial.touch()
            partial.unlink()
        except OSError as error:
            raise StateFileUnusable(
                f"cannot write the state file {path}: {error.strerror}; "
                "give a file in a directory that exists and can be written to: --state-file PATH"
            ) from error

    def _write_state(self) -> None:
        """Keep the state file up to date; the service goes on without it if that fails."""
        path = self.spec.state_file
        if path is None:
            return
        state = {
            "url": self.url,
            "launcher_pid": os.getpid(),
            "orchestrator_pid": self.orchestrator.pid if self.orchestrator else None,
            "orchestrator_pids": [each.pid for each in self.orchestrators],
            "store_pid": self.store.pid if self.store else None,
            "instances": [
                *(each.describe() for each in self.instances),
                *(each.describe() for each in self.gguf_servers),
            ],
        }
        try:
            write_atomically(path, json.dumps(state, indent=2).encode(), 0o644)
        except OSError as error:
            self._warn(f"cannot write the state file {path}: {error.strerror}; going on without")

    def _remove_state(self) -> None:
        path = self.spec.state_file
        if path is None:
            return
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._warn(f"cannot remove the state file {path}: {error.strerror}")

    def _warn(self, text: str) -> None:
        self._emit(PoolEvent(EventKind.WARNED, "tidegate", text))


@dataclass(frozen=True, slots=True)
class _Server:
    """One Triton to start; ``index`` counts servers of the same models."""

    name: str
    models: tuple[str, ...]
    index: int


def _partial(path: Path) -> Path:
    """The path at which a file is written before it takes its place in one step."""
    return path.with_name(path.name + ".partial")


async def _serves(supervised: Supervised) -> None:
    """Wait until a unit serves for the first time. Raises ``StartFailed``."""
    if reason := await supervised.first_outcome():
        raise StartFailed(reason)


async def _together(*work: Coroutine[Any, Any, None]) -> None:
    """Run all coroutines; if one raises, cancel and await the others, then raise its error."""
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
