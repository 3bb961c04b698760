"""A network that breaks where a test wants it to."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from tests.support.rough_network import HOST, Cut, rough_network


@asynccontextmanager
async def proxy(url: str, cut: Cut) -> AsyncIterator[str]:
    """Forwards to ``url``. Every connection is closed when it ends."""
    async with rough_network(urlsplit(url).port or 0) as network:
        network.cut = cut
        yield f"http://{HOST}:{network.port}"


@asynccontextmanager
async def cutting_proxy(url: str, cuts: int, *, after_bytes: int = 1000) -> AsyncIterator[str]:
    """The first ``cuts`` event streams are cut after so many bytes, heads included."""
    left = cuts

    def cut(data: bytes, streamed: int) -> int | None:
        nonlocal left
        is_stream = streamed or b"text/event-stream" in data
        if not left or not is_stream or streamed + len(data) <= after_bytes:
            return None
        left -= 1
        return after_bytes - streamed

    async with proxy(url, cut) as proxied:
        yield proxied
        assert left == 0, "the proxy had nothing to cut"


@asynccontextmanager
async def losing_answers(url: str, status: bytes, times: int) -> AsyncIterator[str]:
    """The first ``times`` answers with that status never arrive; what was asked is done."""
    left = times

    def cut(data: bytes, streamed: int) -> int | None:
        nonlocal left
        if not left or not data.startswith(b"HTTP/1.1 " + status):
            return None
        left -= 1
        return 0

    async with proxy(url, cut) as proxied:
        yield proxied
        assert left == 0, "the proxy had nothing to lose"
