"""A server as the command line names it: a command to start, or a URL."""

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httpx2
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from tidegate.proxy.relay import Connect, Sink, Source

CONNECT_S = 30.0


def is_url(word: str) -> bool:
    return urlsplit(word).scheme in ("http", "https")


def connector(server: Sequence[str], headers: Mapping[str, str]) -> Connect:
    """How to connect to ``server``, a command with its arguments or a URL; ``headers`` go along to
    a URL."""
    if is_url(server[0]):
        return lambda: _over_http(server[0], headers)
    # What started the proxy has set the environment for the server.
    command = StdioServerParameters(command=server[0], args=[*server[1:]], env=dict(os.environ))
    return lambda: stdio_client(command)


@asynccontextmanager
async def _over_http(url: str, headers: Mapping[str, str]) -> AsyncIterator[tuple[Source, Sink]]:
    # An answer may take as long as the call's own limit says.
    timeout = httpx2.Timeout(CONNECT_S, read=None)
    async with (
        httpx2.AsyncClient(headers=dict(headers), timeout=timeout) as client,
        streamable_http_client(url, http_client=client) as streams,
    ):
        yield streams
