"""Two orchestrators, each with a journal, in front of Tritons, and the gates between them. Faults
act on these processes and gates."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Self

from perf.load.connection import HOST
from perf.stack.stack import StackSpec, alive, server_of, stubs_of, tritons
from perf.stack.stack import orchestrating as one_orchestrating
from pool.process.ports import host_port
from pool.units.orchestrator import OrchestratorProcess
from pool.units.triton import TritonInstance

_PIECE = 64 * 1024


class LaneGate:
    """A gate between one orchestrator and its Tritons, initially open. Lanes pass through a port of
    this process for each of ``targets``; ``addresses`` has the ports in the same order.

    A shut gate breaks open lanes and lets no new lane through. The tasks of a restarted
    orchestrator then wait for their model. Lanes of other orchestrators are not affected.
    """

    def __init__(self, targets: Sequence[str]) -> None:
        self.addresses: list[str] = []
        self._targets = targets
        self._is_shut = False
        self._passing: set[asyncio.WriteTransport] = set()
        self._forwarding: set[asyncio.Task[None]] = set()
        self._servers = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for target in self._targets:
            server = await asyncio.start_server(partial(self._accept, target), HOST, 0)
            await self._servers.enter_async_context(server)
            host, port = server.sockets[0].getsockname()[:2]
            self.addresses.append(host_port(host, port))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.shut()
        await self._servers.aclose()
        await asyncio.gather(*self._forwarding, return_exceptions=True)

    def shut(self) -> None:
        """Break open connections, and let no new ones through."""
        self._is_shut = True
        for transport in tuple(self._passing):
            transport.abort()

    def open(self) -> None:
        """Let new connections through."""
        self._is_shut = False

    def _accept(
        self, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        forwarding = asyncio.create_task(self._forward(target, reader, writer))
        self._forwarding.add(forwarding)
        forwarding.add_done_callback(self._forwarding.discard)

    async def _forward(
        self, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        host, _, port = target.rpartition(":")
        transports = {writer.transport}
        self._passing |= transports
        try:
            if self._is_shut:
                return
            there_reader, there = await asyncio.open_connection(host, int(port))
            transports.add(there.transport)
            self._passing |= transports
            if self._is_shut:
                return
            ways = [_carry(reader, there), _carry(there_reader, writer)]
            carrying = [asyncio.ensure_future(way) for way in ways]
            try:
                await asyncio.wait(carrying, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in carrying:
                    way.cancel()
                await asyncio.gather(*carrying, return_exceptions=True)
        except OSError:  # no Triton is there
            pass
        finally:
            for transport in transports:
                transport.abort() if self._is_shut else transport.close()
            self._passing -= transports


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes from ``reader`` to ``writer`` until either end closes."""
    try:
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()
    except OSError:
        pass


GRACE_S = 5.0
"""Grace period in seconds of a planned stop: shorter than some requests take, so that not all work
can simply finish."""

STEP_TIMEOUT_S = 8
"""Seconds after which a paced step counts as hung. A sixth of it takes the worker out of service,
about as fast as on a GPU."""


@dataclass(frozen=True, slots=True)
class World:
    """Running processes. They keep their ports across restarts."""

    tritons: Sequence[TritonInstance]
    orchestrators: Sequence[OrchestratorProcess]
    journals: Sequence[Path]
    gates: Sequence[LaneGate] = ()
    """Gate of each orchestrator for its lanes; empty if lanes connect directly to the Tritons."""
    still: dict[int, float] = field(default_factory=dict)
    """Ids of processes that were stopped, with the time they continued: inf while stopped."""
    fault_file: Path = Path("/nonexistent")
    """File with the device faults of workers with the paced synthetic engine
    (``worker.runner.synthetic``)."""

    def pids(self) -> set[int]:
        """Ids of all running processes."""
        found = {one.pid for one in self.orchestrators}
        for triton in self.tritons:
            found |= {server_of(triton), *stubs_of(triton)}
        return {pid for pid in found if pid is not None}

    def parts(self) -> dict[str, list[int]]:
        """Ids of all running processes, by part."""
        return {
            "orchestrator": [alive(one.pid) for one in self.orchestrators],
            "Triton": [server_of(one) for one in self.tritons],
            "worker": [pid for one in self.tritons for pid in stubs_of(one)],
        }

    def memory_prefixes(self) -> set[str]:
        """Prefixes of the names of the shared memory of the servers that run now; others on the
        same machine have their own."""
        found = set()
        for triton in self.tritons:
            arguments = Path(f"/proc/{server_of(triton)}/cmdline").read_bytes().decode().split("\0")
            found |= {one.removeprefix("--id=") for one in arguments if one.startswith("--id=")}
        return found


@asynccontextmanager
async def orchestrating(
    addresses: Sequence[Sequence[str]],
    env: Mapping[str, str] | None = None,
    constants: Mapping[str, object] | None = None,
) -> AsyncIterator[tuple[list[OrchestratorProcess], list[Path]]]:
    """Start an orchestrator in front of each of ``addresses``, ready, with a journal of its own;
    ``env`` are more ``TIDEGATE_…``; ``constants`` are set there (``perf.stack.constants``)."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-chaos-")))
        journals = [folder / f"journal-{number}.sqlite" for number in range(len(addresses))]
        started = [
            await stack.enter_async_context(
                one_orchestrating(
                    addresses[number],
                    {
                        "TIDEGATE_JOURNAL__PATH": str(journal),
                        "TIDEGATE_SHUTDOWN__GRACE_S": str(GRACE_S),
                        "TIDEGATE_TELEMETRY__LOG_FORMAT": "text",
                        **(env or {}),
                    },
                    f"chaos-orchestrator-{number}",
                    constants,
                )
            )
            for number, journal in enumerate(journals)
        ]
        yield started, journals


@asynccontextmanager
async def running(spec: StackSpec) -> AsyncIterator[World]:
    """Run two of each. Raises ``ProvisionError`` when one cannot be started."""
    with tempfile.TemporaryDirectory(prefix="tidegate-chaos-") as folder:
        file = Path(folder) / "fault"
        if spec.engine == "synthetic-paced":
            constants = {"worker.service.failure.STEP_TIMEOUT_S": STEP_TIMEOUT_S}
            spec = replace(spec, slow_file=str(file), constants=constants)
        async with tritons(spec, 2) as instances:
            targets = [one.grpc_address for one in instances]
            async with (
                LaneGate(targets) as first,
                LaneGate(targets) as second,
                orchestrating([first.addresses, second.addresses]) as (
                    orchestrators,
                    journals,
                ),
            ):
                gates = [first, second]
                yield World(instances, orchestrators, journals, gates, fault_file=file)


def stood_still(world: World, pids: Collection[int | None], since: float) -> bool:
    """Whether one of these processes was stopped after a time on the monotonic clock."""
    return any(world.still.get(pid, 0.0) >= since for pid in pids if pid is not None)
