"""A network between a process and a server that is slow, loses everything, or breaks, on demand."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

HOST = "127.0.0.1"
_PIECE = 64 * 1024
Cut = Callable[[bytes, int], int | None]
"""How much of this piece of an answer to deliver before the connection is dropped; None: go on. The
second argument is what came of the event stream before it, in bytes; 0 in other answers."""


class RoughNetwork:
    """A port that leads to another one. All is well until a test says otherwise."""

    def __init__(self, target: int) -> None:
        self.port = 0
        """Where the server is found, once this was started."""
        self.delay_s = 0.0
        """How much later the server's answers come."""
        self.refuses = False
        """Whether nobody gets through who connects from now on."""
        self.cut: Cut = lambda piece, streamed: None
        self.target = target
        self._passes = asyncio.Event()
        self._passes.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def partition(self) -> None:
        """Nothing gets through until ``heal``, either way: nobody is told, and what is sent
        meanwhile comes late."""
        self._passes.clear()

    def heal(self) -> None:
        """All is well from now on; a slow network stays slow."""
        self.refuses = False
        self._passes.set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection, until either end is gone."""
        carrying = asyncio.create_task(self._carry(reader, writer))
        self._tasks.add(carrying)
        carrying.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        transports = {writer.transport}
        try:
            await self._passes.wait()
            if self.refuses:
                return
            there_reader, there = await asyncio.open_connection(HOST, self.target)
            transports.add(there.transport)
            async with asyncio.TaskGroup() as group:
                ways = (self._ask(reader, there), self._answer(there_reader, writer))
                both = [group.create_task(way) for way in ways]
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                for way in both:
                    way.cancel()
        except OSError:  # the server is not there
            pass
        finally:
            for transport in transports:
                transport.abort()

    async def close(self) -> None:
        """End all connections."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await _read(reader):
            await self._passes.wait()
            writer.write(piece)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due, piece = await late.get()
                await asyncio.sleep(due - loop.time())
                await self._passes.wait()
                writer.write(piece)
                late.task_done()

        delivering = asyncio.create_task(deliver())
        streamed = 0
        try:
            while piece := await _read(reader):
                end = self.cut(piece, streamed)
                late.put_nowait((loop.time() + self.delay_s, piece[:end]))
                if end is not None:
                    await late.join()
                    return
                if b"text/event-stream" in piece or streamed:
                    streamed += len(piece)
        finally:
            delivering.cancel()


async def _read(reader: asyncio.StreamReader) -> bytes:
    """The next piece; nothing where the other end is gone, however it went."""
    try:
        return await reader.read(_PIECE)
    except OSError:
        return b""


@asynccontextmanager
async def rough_network(target: int) -> AsyncIterator[RoughNetwork]:
    """A network to a port of this machine, until the block ends."""
    network = RoughNetwork(target)
    server = await asyncio.start_server(network.accept, HOST, 0)
    network.port = server.sockets[0].getsockname()[1]
    try:
        async with server:
            yield network
            server.close()
            await network.close()
    finally:
        await network.close()
