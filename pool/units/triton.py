"""Runs one Triton server: starts it on its ports, detects every kind of loss, ends it.

Kinds of loss, each seen on a real server, and how this detects them:

- the server exits or is killed                → its guardian ends
- the Python stub of a model is killed         → Triton still calls the model ready, so the
                                                 stub processes are watched (0.1 s)
- the server hangs                             → it misses three heartbeats 15 s apart (PV-1)
- a model is unloaded                          → its stub ends
"""

import asyncio
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from catalog.errors import StartFailed
from catalog.hosts import connect_host
from orchestrator.tls import SETTING
from pool.engines.triton import (
    Links,
    TritonInstall,
    TritonPorts,
    TritonSpec,
    compile_models,
    triton_command,
    triton_environment,
)
from pool.process.guardian import SHARED_MEMORY, remove_shared_memory
from pool.process.http_get import get
from pool.process.logs import why_triton_ended
from pool.process.ports import host_port
from pool.process.proc import children_of, has_ended_child, is_running
from pool.process.process import FoundRun, new_mark
from pool.supervise import TERM_S, ProcessUnit, UnitOptions, first_of

if TYPE_CHECKING:
    from pool.units.triton_control import TritonControl

_CRASHED = frozenset(
    128 + signum for signum in (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV)
)
"""Exit statuses of a server that crashed; a wrong setting never causes them."""

_UNNOTICED_S = 2.0
"""Seconds until an ended process of a model fails the start. Triton usually notices it at once; if
not, it would wait until the load timeout."""
_READY_POLL_S = 0.03
_STUB_POLL_S = 0.1
_ASK_S = 2.0
_LEAST_FILES = 256
"""Minimum limit of open files for a Triton. With 64 it hangs without a log line. 70 were enough for
the demo model on two cores. It opens some files for each core and each lane."""


def require_files(name: str) -> None:
    """Raise our limit of open files, which Triton inherits. Raises ``StartFailed``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _LEAST_FILES:
        return
    if hard != resource.RLIM_INFINITY and hard < _LEAST_FILES:
        raise StartFailed(
            f"{name}: Triton needs {_LEAST_FILES} open files, but the limit is {hard}: raise it "
            f"with ulimit -n {_LEAST_FILES} (a service's: LimitNOFILE); each client takes one more"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (_LEAST_FILES, hard))


class _Crashed(StartFailed):
    """The server crashed, so another start may succeed."""


class TritonInstance(ProcessUnit):
    """A supervised Triton. It keeps its ports across restarts, so that lanes reconnect."""

    def __init__(
        self,
        name: str,
        install: TritonInstall,
        spec: TritonSpec,
        ports: TritonPorts,
        **options: Unpack[UnitOptions],
    ) -> None:
        super().__init__(name, **options)
        self.ports = ports
        self._install = install
        self._spec = spec
        self._server_id = ""
        self._stubs: list[int] = []

    @property
    def all_ports(self) -> tuple[int, int, int]:
        return self.ports

    @property
    def grpc_address(self) -> str:
        """``host:port`` for lanes."""
        return host_port(connect_host(self._spec.host), self.ports.grpc)

    @property
    def http_address(self) -> str:
        """``host:port`` of Triton's own HTTP endpoint."""
        return host_port(connect_host(self._spec.host), self.ports.http)

    @property
    def where(self) -> str:
        return f"gRPC on {self.grpc_address}"

    def describe(self) -> dict[str, object]:
        """Ports and process ids, for tests and tools."""
        return {
            "name": self.name,
            "http_port": self.ports.http,
            "grpc_port": self.ports.grpc,
            "metrics_port": self.ports.metrics,
            "pid": self.pid,
            "stub_pids": self._stubs,
        }

    async def start(self) -> None:
        """Start the server and wait for its models. Raises ``StartFailed`` with the reason.

        A server that crashes during the start is started once more: Triton 24.10 aborts with a
        ``lock_exception`` if a model's new process gets no CPU time on a busy machine.
        """
        try:
            await self._start()
        except _Crashed as crash:
            self._warn(f"{crash}\nStarting it once more (the name of its earlier log ends in .1)")
            await self._start()

    async def _start(self) -> None:
        require_files(self.name)
        await asyncio.to_thread(self._require_tls)
        # Unique per start, so that the old server's regions and answers cannot look like new ones.
        server_id = self._server_id = new_mark()
        compile_models(self._spec)
        try:
            install, spec, env = self._linked(Links(server_id))
            await self._spawn(triton_command(install, spec, self.ports, server_id), env, server_id)
        except BaseException:
            remove_shared_memory(server_id)  # no other process does it
            raise
        await self.resume()

    def _linked(self, links: Links) -> tuple[TritonInstall, TritonSpec, dict[str, str]]:
        """The server, its models and its environment, with links instead of paths that are not
        plain. Raises ``StartFailed``."""
        try:
            install, spec = links.install(self._install), links.spec(self._spec)
            return install, spec, links.environment(triton_environment(install, spec))
        except OSError as error:
            raise StartFailed(
                f"{self.name}: cannot make links in {SHARED_MEMORY}, which Triton needs when one "
                f"of its paths has spaces or is not plain ASCII: {error.strerror}"
            ) from error

    def _require_tls(self) -> None:
        """Raise ``StartFailed`` if no client with these TLS settings could reach the server."""
        if self._spec.tls is None:
            return
        try:
            self._spec.tls.check_served(connect_host(self._spec.host))
        except ValueError as error:
            raise StartFailed(f"{self.name} cannot serve with {SETTING}: {error}") from None

    async def attach(self, found: FoundRun) -> None:
        self.ports, self._server_id = TritonPorts(*found.ports), found.label.mark
        await super().attach(found)

    async def resume(self) -> None:
        assert self._process is not None, "start it first"
        process = self._process
        deadline = time.monotonic() + self._spec.load_timeout_s
        dead_since: float | None = None
        async with self._control() as control:
            while not await self._is_ready(control):
                if not process.running:
                    failure = self._failure(await self._status())
                    crashed = await process.wait() in _CRASHED
                    raise _Crashed(str(failure)) if crashed else failure
                now = time.monotonic()
                dead_since = (dead_since or now) if has_ended_child(process.pid) else None
                if dead_since is not None and now - dead_since > _UNNOTICED_S:
                    raise self._failure("waits for a Python process that has ended")
                if now > deadline:
                    raise self._failure(f"was not ready after {self._spec.load_timeout_s:.0f} s")
                await asyncio.sleep(_READY_POLL_S)
        self._stubs = children_of(process.pid)

    async def lost(self) -> str:
        """Wait until it no longer serves; return the reason in a few words."""
        return await first_of(self._process_end(), self._stub_end(), self._heartbeats())

    async def stop(self, drain_s: float) -> None:
        """Drain → SIGTERM → SIGKILL of the process group → removal of its shared memory."""
        process, stubs = self._process, self._stubs
        if process is None:
            return
        if drain_s > 0 and stubs and process.running:
            async with self._control() as control:
                await asyncio.gather(
                    *(
                        control.drain(model, drain_s, drain_s + 0.5, token=self._spec.lane_token)
                        for model in self._spec.models
                    )
                )
            ending = asyncio.create_task(process.end(TERM_S))
            # When the stubs are gone, every model has finalized; only Triton's slow exit remains.
            await _until(lambda: ending.done() or not any(map(is_running, stubs)))
            process.order_kill()
            await ending
        else:
            await process.kill()
        self._process, self._stubs = None, []

    def _control(self) -> "TritonControl":
        # Imported here: importing gRPC takes a fifth of a second, while the server starts.
        from pool.units.triton_control import TritonControl

        return TritonControl(self.grpc_address, self._spec.tls)

    async def _answers(self) -> bool:
        async with self._control() as control:
            return await self._has_models(control)

    async def _is_ready(self, control: "TritonControl") -> bool:
        return (
            await control.is_server(self._server_id, _ASK_S)
            and await self._has_models(control)
            and await self._tells_metrics()
        )

    async def _tells_metrics(self) -> bool:
        """Whether Triton serves metrics. It starts them last, so it then has all of its ports. If a
        port is taken, it serves gRPC for a moment before it ends."""
        host = connect_host(self._spec.host)
        status, body = await get(host, self.ports.metrics, "/metrics")
        return status == 200 and b"nv_" in body

    async def _has_models(self, control: "TritonControl") -> bool:
        return all([await control.is_ready(model, _ASK_S) for model in self._spec.models])

    def _reason_in(self, log: Path) -> str:
        return why_triton_ended(log)

    async def _process_end(self) -> str:
        return f"the server {await self._status()}"

    async def _stub_end(self) -> str:
        assert self._process is not None, "start it first"
        while True:
            await _until(lambda: not all(map(is_running, self._stubs)))
            known, now = len(self._stubs), children_of(self._process.pid)
            if len(now) < known:
                return "a model's Python process ended"
            self._stubs = now  # a model was reloaded: its new process is in the list


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - there is no event: /proc is polled
        await asyncio.sleep(_STUB_POLL_S)
