"""A client of HTTP/2 on one connection: many requests at once, each of which may be reset."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, ResponseReceived, StreamEnded, StreamReset


@dataclass(eq=False)
class Exchange:
    """One request and what came of it so far."""

    client: "H2Client"
    id: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    reset: ErrorCodes | None = None
    """Why the other side broke it off."""
    is_over: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def status(self) -> int:
        """Of HTTP; 0 before there is one."""
        return int(self.headers.get(":status", 0))

    async def finished(self) -> "Exchange":
        """Wait for its end, whatever that is."""
        while not self.is_over:
            await self.news()
        return self

    async def lines(self) -> AsyncIterator[str]:
        """The lines of its body as they come."""
        at = 0
        while True:
            while (end := self.body.find(b"\n", at)) >= 0:
                yield self.body[at:end].decode()
                at = end + 1
            if self.is_over:
                return
            await self.news()

    async def news(self) -> None:
        await self._news.wait()
        self._news.clear()

    def cancel(self) -> None:
        """Tell the other side that nobody wants the answer any more; the connection stays."""
        self.client.cancel(self)

    def end(self) -> None:
        self.is_over = True
        self.tell()

    def tell(self) -> None:
        self._news.set()


class H2Client:
    """One connection."""

    def __init__(
        self, authority: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._authority = authority
        self._reader, self._writer = reader, writer
        self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self._exchanges: dict[int, Exchange] = {}

    @classmethod
    @asynccontextmanager
    async def connected(
        cls, host: str, port: int, trust: ssl.SSLContext
    ) -> AsyncIterator["H2Client"]:
        """A client while the block lasts. Fails where the server does not choose HTTP/2."""
        trust.set_alpn_protocols(["h2"])
        reader, writer = await asyncio.open_connection(host, port, ssl=trust)
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
        client = cls(f"{host}:{port}", reader, writer)
        client._h2.initiate_connection()
        client._flush()
        reading = asyncio.create_task(client._read())
        try:
            yield client
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def post(self, path: str, body: dict[str, Any], headers: Mapping[str, str]) -> Exchange:
        """Send a small request; its answer comes later."""
        data = json.dumps(body).encode()
        exchange = Exchange(self, self._h2.get_next_available_stream_id())
        self._exchanges[exchange.id] = exchange
        fields = {
            ":method": "POST",
            ":scheme": "https",
            ":authority": self._authority,
            ":path": path,
            "content-type": "application/json",
            "content-length": str(len(data)),
            **{name.lower(): value for name, value in headers.items()},
        }
        self._h2.send_headers(exchange.id, list(fields.items()))
        self._h2.send_data(exchange.id, data, end_stream=True)
        self._flush()
        return exchange

    def cancel(self, exchange: Exchange) -> None:
        self._h2.reset_stream(exchange.id, ErrorCodes.CANCEL)
        exchange.end()
        self._flush()

    async def _read(self) -> None:
        while data := await self._reader.read(65536):
            for event in self._h2.receive_data(data):
                exchange = self._exchanges.get(getattr(event, "stream_id", 0))
                if exchange is not None:
                    self._take(exchange, event)
            self._flush()
        for exchange in self._exchanges.values():
            exchange.end()

    def _take(self, exchange: Exchange, event: object) -> None:
        match event:
            case ResponseReceived():
                exchange.headers.update(event.headers)
            case DataReceived():
                exchange.body += event.data
                self._h2.acknowledge_received_data(event.flow_controlled_length, exchange.id)
            case StreamReset():
                exchange.reset = ErrorCodes(event.error_code)
                exchange.end()
            case StreamEnded():
                exchange.end()
        exchange.tell()

    def _flush(self) -> None:
        self._writer.write(self._h2.data_to_send())
