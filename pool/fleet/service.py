"""Runs a pool manager: follows its file and executes orders (``tidegate pool run``)."""

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from catalog.errors import PoolFileInvalid, ProvisionError
from catalog.hosts import connect_host, is_loopback
from catalog.paths import state_dir
from pool.engines.ensure import ensure_triton
from pool.engines.triton import PLAIN_TOKEN, require_guard
from pool.events import EventKind, PoolEvent, pool_log
from pool.fleet.gpus import Gpus
from pool.fleet.home import Answer, PoolHome, PoolState, control_socket, home_of
from pool.fleet.metrics import pool_metrics, serving_metrics
from pool.fleet.registrar import RENEWALS, Registrar, Target
from pool.fleet.specs import MODELS, ORCHESTRATOR, InstanceSpec, specs_of
from pool.fleet.units import PoolMachine
from pool.manager import POOL, Manager
from pool.pool_file import PoolFile, read_pool_file
from pool.preflight.nvml import GpuDevice
from pool.process.ports import host_port
from pool.supervise import cancelled

LOOK_S = 1.0
"""Seconds between checks of the file; a change is read once the file is unchanged that long."""
LANE_TOKEN = "TIDEGATE_LANES__TOKEN"
ADMIN_TOKEN = "TIDEGATE_ADMIN_TOKEN"
_FROM_THE_START = ("home", "triton", "heartbeat_s", "metrics_port", "drain_s", "advertise")
"""Settings of ``[pool]`` that take effect only when a manager starts."""
Emit = Callable[[PoolEvent], None]


class PoolService:
    """One manager, from its claim of the pool to its end."""

    def __init__(self, path: Path, gpus: Callable[[], list[GpuDevice]], emit: Emit) -> None:
        """Read the pool file at ``path``. Raises ``PoolFileInvalid``."""
        self.path = path.absolute()
        self.file = read_pool_file(path)
        self.home = PoolHome(home_of(self.file))
        self.manager: Manager | None = None
        loop = asyncio.get_running_loop()
        self._specs = specs_of(self.file)
        self._emit = emit
        self._gpus = Gpus(gpus, self.file.pool.heartbeat_s, loop.time)
        self._registrar = Registrar(emit)
        self._ending: asyncio.Future[float | None] = loop.create_future()
        self._ended = asyncio.Event()
        self._applying: asyncio.Task[None] | None = None
        self._seen = _version_of(self.path)

    async def run(self) -> None:
        """Run the pool until ``end`` is called. Raises ``ProvisionError`` if it cannot start."""
        self.home.claim()
        try:
            async with contextlib.AsyncExitStack() as stack:
                opening = asyncio.create_task(self._open(stack))
                either: list[asyncio.Future[Any]] = [opening, self._ending]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if self.manager is None and not opening.done():  # during a Triton download
                    await cancelled(opening)
                    return
                await opening
                await self._close(await self._ending)
        finally:
            self._ended.set()
            self.home.release()

    def end(self, drain_s: float | None) -> None:
        """End the manager; running work has ``drain_s``. None: the instances keep running. A second
        call with 0 cuts the first one short."""
        if not self._ending.done():
            self._ending.set_result(drain_s)
        elif drain_s == 0.0 and self.manager is not None:
            self.manager.kill()

    def reload(self) -> Answer:
        """Reload the file and start to apply it. If the file is invalid, changes nothing, emits an
        event and raises ``PoolFileInvalid``."""
        assert self.manager is not None
        self._seen = _version_of(self.path)
        try:
            file = read_pool_file(self.path)
            self._guard(file, self.manager.state.lane_token)
        except ProvisionError as error:
            self._emit(PoolEvent(EventKind.REFUSED_FILE, POOL, str(error)))
            raise PoolFileInvalid(str(error)) from error
        before, now = self.file.pool, file.pool
        if stay := [n for n in _FROM_THE_START if getattr(now, n) != getattr(before, n)]:
            self._warn(f"{', '.join(stay)} in [pool] take effect at the manager's next start")
        self._warn_of_loopback(file)
        old, new = self._specs, specs_of(file)
        self.file, self._specs = file, new
        self._applying = asyncio.create_task(self._apply(self._applying), name="apply")
        return {
            "start": sorted(new.keys() - old.keys()),
            "replace": sorted(n for n in new.keys() & old.keys() if new[n].digest != old[n].digest),
            "end": sorted(old.keys() - new.keys()),
        }

    async def answer(self, order: Answer) -> Answer:
        """Answer a command's order."""
        match order["do"]:
            case "status":
                return self.status()
            case "reload":
                return self.reload()
            case "stop":
                how = order.get("how", "drain")
                self.end({"now": 0.0, "leave": None, "drain": self.file.pool.drain_s}[how])
                await self._ended.wait()
                return {"ended": True}
        raise ValueError(f"{order['do']!r}")

    def status(self) -> Answer:
        """The state of every instance, as an answer."""
        assert self.manager is not None
        return {
            "manager_pid": os.getpid(),
            "file": str(self.path),
            "home": str(self.home.path),
            "instances": [
                {
                    "name": name,
                    "state": member.state.value,
                    "reason": member.reason,
                    "address": member.unit.address,
                    "where": member.unit.where,
                    "pid": member.unit.pid,
                    "restarts": member.restarts,
                    "heartbeats_missed": member.unit.misses,
                    "log": str(self.home.logs / f"{name}.log"),
                }
                for name, member in sorted(self.manager.members.items())
            ],
            "targets_failing": self._registrar.errors,
        }

    # ── its life ─────────────────────────────────────────────────────────────────────────────

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        pool, state = self.file.pool, self.home.read(self._warn)
        state.lane_token = self._lane_token(state)
        self._guard(self.file, state.lane_token)
        self._warn_of_loopback(self.file)
        install = await ensure_triton(pool.triton, state_dir(), self._warn)
        machine = PoolMachine(
            install=install,
            state_dir=state_dir(),
            logs=self.home.logs,
            lane_token=state.lane_token,
            warn=self._warn,
            home=self.home.path,
            gpus=self._gpus,
            sharing=self._on_cpu,
            heartbeat_s=pool.heartbeat_s,
            advertise=pool.advertise,
        )
        stack.push_async_callback(self._registrar.follow, {})
        self.manager = Manager(
            machine,
            self._emit,
            drain_s=pool.drain_s,
            home=self.home,
            registrar=self._registrar,
            state=state,
        )
        await stack.enter_async_context(control_socket(self.home.path, self.answer))
        if pool.metrics_port is not None:
            metrics = pool_metrics(self._numbers)
            await stack.enter_async_context(serving_metrics(metrics, pool.metrics_port))
        await self._registrar.follow(self._targets())
        await self.manager.recover(self._specs)
        self._applying = asyncio.create_task(self._apply(None), name="apply")
        stack.push_async_callback(cancelled, asyncio.create_task(self._follow_file()))

    async def _close(self, drain_s: float | None) -> None:
        assert self.manager is not None
        if self._applying is not None:
            await cancelled(self._applying)
        if drain_s is None:
            await self.manager.leave()
        else:
            await self.manager.stop(drain_s)
            await self.manager.told()

    async def _apply(self, before: "asyncio.Task[None] | None") -> None:
        assert self.manager is not None
        if before is not None:
            await asyncio.wait([before])
        try:
            await self._registrar.follow(self._targets())
            await self.manager.apply(self._specs)
        except Exception:
            pool_log.exception("the file could not be applied; the next reload tries again")

    async def _follow_file(self) -> None:
        """Reload a new version once it is unchanged between two checks."""
        pending = self._seen
        while True:
            await asyncio.sleep(LOOK_S)
            version = _version_of(self.path)
            if version in (self._seen, None):
                pending = self._seen
            elif version != pending:
                pending = version
            else:
                with contextlib.suppress(PoolFileInvalid):  # reported by an event
                    self.reload()

    def _on_cpu(self) -> int:
        """Number of instances that share this machine's memory."""
        specs = self._specs.values()
        return sum(isinstance(spec, InstanceSpec) and not spec.on_gpu for spec in specs)

    def _lane_token(self, state: PoolState) -> str:
        """The lane token: the operator's, else the saved one, else a new one if we start both
        sides. It must outlive the manager, because running instances were started with it."""
        chosen = os.environ.get(LANE_TOKEN, "") or state.lane_token
        if not chosen and self.file.orchestrator is not None:
            chosen = secrets.token_urlsafe(32)
        return chosen

    def _warn_of_loopback(self, file: PoolFile) -> None:
        """Warn if a remote orchestrator would get this machine's loopback address."""
        told = file.pool.advertise or connect_host(file.pool.host)
        if not is_loopback(told):
            return
        for entry in file.orchestrators.register_at:
            if not is_loopback(urlsplit(entry).hostname or ""):
                self._warn(
                    f"{entry} gets instances on {told}, which only this machine can reach: if it is"
                    " on another machine, set host in [pool], or advertise"
                )

    def _guard(self, file: PoolFile, lane_token: str) -> None:
        require_guard(
            file.pool.host,
            MODELS,
            lane_token=lane_token,
            plain_token=os.environ.get(PLAIN_TOKEN, ""),
            is_open=file.pool.open,
            opened_by="open = true in [pool]",
        )

    def _targets(self) -> dict[str, Target]:
        """Every target to update, by name."""
        told, ttl_s = self.file.orchestrators, RENEWALS * self.file.pool.heartbeat_s
        key = os.environ.get(told.key_env, "")
        targets = {}
        for entry in told.register_at:
            url = entry.rstrip("/")
            targets[url] = Target(url, key, ttl_s)
        if self.file.orchestrator is not None:
            own_key = os.environ.get(ADMIN_TOKEN, "")
            targets[ORCHESTRATOR] = Target(ORCHESTRATOR, own_key, ttl_s, self._own_url)
        return targets

    def _own_url(self) -> str:
        """URL of the pool's orchestrator; empty while it does not serve."""
        assert self.manager is not None
        member, settings = self.manager.members.get(ORCHESTRATOR), self.file.orchestrator
        if member is None or settings is None or not member.is_ready:
            return ""
        return f"http://{host_port(connect_host(settings.host), member.unit.all_ports[0])}"

    def _numbers(self) -> Answer:
        asked = self._gpus.hits + self._gpus.misses
        return {**self.status(), "hit_rate": self._gpus.hits / asked if asked else 0.0}

    def _warn(self, text: str) -> None:
        self._emit(PoolEvent(EventKind.WARNED, POOL, text))


def _version_of(path: Path) -> tuple[int, int, int] | None:
    """A version of the file that changes with each write; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
