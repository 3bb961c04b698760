"""Processes in the place of pods: the commands of docker/kubernetes, and the signals of a kubelet.

A pod that is deleted leaves the endpoints at once, while its ``preStop`` hook runs; then it gets
SIGTERM, and SIGKILL when the grace is over.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from perf.load.connection import HOST
from pool.process.http_get import http_status
from pool.process.logs import tail
from pool.process.ports import free_ports

SLEEP_S: Final = 2.0
"""Seconds for which ``preStop`` waits for proxies to hear that the pod goes."""
DRAIN_S: Final = 10.0
GRACE_S: Final = SLEEP_S + DRAIN_S + 8.0
TOKEN: Final = "clients"
"""Token that clients show."""
_ADMIN_TOKEN: Final = "operators"
_READY_S: Final = 120.0
_POLL_S: Final = 0.1
_TIDEGATE: Final = (sys.executable, "-P", "-m", "tidegate")


@dataclass(slots=True)
class Pod:
    """One process with its children. ``probe`` is the port and path that say it is ready."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    address: str
    """``host:port`` by which others reach it."""
    probe: tuple[int, str]
    log: Path
    pre_stop: tuple[str, ...] = ()
    """Command of the hook, which runs in ``env`` and ``pre_stop_env``; empty for no hook."""
    pre_stop_env: Mapping[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it and wait until it is ready. Raises ``RuntimeError`` when it ends before, or is
        not ready in two minutes."""
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *_TIDEGATE,
                *self.command,
                env={**os.environ, **self.env},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        ends_at = time.monotonic() + _READY_S
        while await http_status(HOST, *self.probe) != 200:
            if self.process.returncode is not None or time.monotonic() > ends_at:
                raise RuntimeError(f"{self.name} did not become ready:\n{tail(self.log)}")
            await asyncio.sleep(_POLL_S)

    async def delete(self) -> tuple[float, bool]:
        """End it as a kubelet does: the seconds that it took, and whether SIGKILL was needed."""
        assert self.process is not None
        begun = time.monotonic()
        try:
            async with asyncio.timeout(GRACE_S):
                if self.pre_stop:
                    await asyncio.sleep(SLEEP_S)
                    env = {**os.environ, **self.env, **self.pre_stop_env}
                    hook = await asyncio.create_subprocess_exec(*_TIDEGATE, *self.pre_stop, env=env)
                    await hook.wait()
                if self.process.returncode is None:
                    self.process.terminate()
                await self.process.wait()
        except TimeoutError:
            self.kill()
            await self.process.wait()
            return time.monotonic() - begun, True
        return time.monotonic() - begun, False

    def kill(self) -> None:
        """Send SIGKILL to the process and its children, if it still runs."""
        if self.process is not None and self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)


@dataclass(slots=True)
class Ended:
    """How the pods that were replaced have ended."""

    seconds: dict[str, float] = field(default_factory=dict)
    """From the deletion to the end, by pod."""
    killed: list[str] = field(default_factory=list)
    """Names of pods that the grace was too short for."""

    def add(self, pod: Pod, seconds: float, was_killed: bool) -> None:
        self.seconds[pod.name] = round(seconds, 2)
        if was_killed:
            self.killed.append(pod.name)


class Cluster:
    """Workers by a headless service, and orchestrators by a service; ``folder`` is for logs."""

    def __init__(self, folder: Path, worker_env: Mapping[str, str]) -> None:
        self.endpoints: list[str] = []
        """Addresses of the orchestrators that are ready and not about to go."""
        self.ended = Ended()
        self._folder = folder
        self._names = folder / "workers"
        self._worker_env = worker_env
        self._workers: list[Pod] = []
        self._orchestrators: list[Pod] = []
        self._ready_workers: list[str] = []
        self._begun = 0

    async def start(self, workers: int, orchestrators: int) -> None:
        """Start everything. Raises ``RuntimeError`` for what did not become ready."""
        self._workers = [self._worker(number) for number in range(workers)]
        await asyncio.gather(*(pod.start() for pod in self._workers))
        self._tell([pod.address for pod in self._workers])
        for _ in range(orchestrators):
            await self._add_orchestrator()

    async def upgrade_workers(self) -> None:
        """Replace each worker, as a StatefulSet does: the last first, one after the other."""
        for number in reversed(range(len(self._workers))):
            old = self._workers[number]
            self._tell([one for one in self._ready_workers if one != old.address])
            self.ended.add(old, *await old.delete())
            self._workers[number] = new = self._worker(number)
            await new.start()
            self._tell([*self._ready_workers, new.address])

    async def upgrade_orchestrators(self) -> None:
        """Replace each orchestrator, as a Deployment does that may have one more and none fewer."""
        for old in list(self._orchestrators):
            await self._add_orchestrator()
            self.endpoints.remove(old.address)
            self.ended.add(old, *await old.delete())
            self._orchestrators.remove(old)  # only now: a run that is broken off kills what is left

    def kill(self) -> None:
        """Send SIGKILL to whatever still runs."""
        for pod in (*self._workers, *self._orchestrators):
            pod.kill()

    async def end(self) -> None:
        """End everything, orchestrators first."""
        pods = (*self._orchestrators, *self._workers)
        for pod in pods:
            if pod.process is not None and pod.process.returncode is None:
                pod.process.terminate()
        await asyncio.gather(*(pod.process.wait() for pod in pods if pod.process is not None))

    def _tell(self, addresses: Sequence[str]) -> None:
        """Write the ready workers into the file that orchestrators follow, whole or not at all."""
        self._ready_workers = list(addresses)
        fresh = self._names.with_suffix(".new")
        fresh.write_text("".join(f"{address}\n" for address in addresses))
        fresh.replace(self._names)

    async def _add_orchestrator(self) -> None:
        pod = self._orchestrator()
        self._orchestrators.append(pod)
        await pod.start()
        self.endpoints.append(pod.address)

    def _worker(self, number: int) -> Pod:
        self._begun += 1
        http, grpc, metrics = free_ports(3)
        name = f"worker-{number}.{self._begun}"
        ports = {"--http-port": http, "--grpc-port": grpc, "--metrics-port": metrics}
        command = ("worker", "--drain", f"{DRAIN_S:g}", "--log-to-stderr")
        return Pod(
            name,
            (*command, *(str(word) for pair in ports.items() for word in pair)),
            self._worker_env,
            f"{HOST}:{grpc}",
            (http, "/v2/models/llm/ready"),
            self._folder / f"{name}.log",
        )

    def _orchestrator(self) -> Pod:
        self._begun += 1
        port, health = free_ports(2)
        name = f"orchestrator.{self._begun}"
        env = {
            "TIDEGATE_INSTANCES": f"file:{self._names}",
            "TIDEGATE_HEALTH__PORT": str(health),
            "TIDEGATE_SHUTDOWN__GRACE_S": "5",
            "TIDEGATE_TOKEN": TOKEN,
            "TIDEGATE_ADMIN_TOKEN": _ADMIN_TOKEN,
        }
        return Pod(
            name,
            ("serve", "--host", HOST, "--port", str(port)),
            env,
            f"{HOST}:{port}",
            (health, "/health/ready"),
            self._folder / f"{name}.log",
            ("drain", "--grace", f"{DRAIN_S:g}"),
            {"TIDEGATE_TOKEN": _ADMIN_TOKEN, "TIDEGATE_URL": f"http://{HOST}:{port}"},
        )
