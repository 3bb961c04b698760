"""Gates between one orchestrator and its Tritons, which can be shut.

Lanes go through a port of this process for each Triton. While the gate is shut open ones break, and
new ones get nowhere: what a restarted orchestrator has taken on waits for its model, with whoever
follows it. Nobody else's lanes notice.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Self

from perf.load.connection import HOST
from pool.process.ports import host_port

_PIECE = 64 * 1024


class Gate:
    """A gate, open at first. The orchestrator finds ``targets`` at ``addresses``, in the same
    order."""

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
        """Break open connections, and let nobody through."""
        self._is_shut = True
        for transport in tuple(self._passing):
            transport.abort()

    def open(self) -> None:
        """Let through whoever comes from now on."""
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
    """Copy bytes from ``reader`` to ``writer`` until either end is gone."""
    try:
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()
    except OSError:
        pass
