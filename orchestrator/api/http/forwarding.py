"""Requests for what another orchestrator has, handed on to it.

An id that is not known here may be known to another: the shared state says who has it, and that one
answers as if it had been asked itself, with the client's own headers and key. Whoever hangs up
here, hangs up there.
"""

from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from orchestrator.api.http.context import CONTEXT
from orchestrator.errors import NotReady, TidegateError

if TYPE_CHECKING:  # its library is an extra
    from orchestrator.state.shared_state import SharedState

FORWARDED_HEADER = "x-tidegate-forwarded"
"""Marks a request that another orchestrator has handed on, which is not handed on again."""
CONNECT_S = 2.0
_HOP_BY_HOP = frozenset(
    (
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)


class Forwarding:
    """Hands requests on. Its connections are closed with the application."""

    def __init__(self, shared_state: "SharedState") -> None:
        self._shared_state = shared_state
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def answer(self, request: web.Request, error: TidegateError) -> web.StreamResponse | None:
        """The answer of whoever has what ``error`` says is unknown here; None where nobody has it,
        which ``error`` then says more of. Raises ``NotReady`` where it is about to be taken on, or
        its holder does not answer; ``NoCapacity`` where there is no room for it."""
        if not error.item_id or FORWARDED_HEADER in request.headers:
            return None
        url = await self._shared_state.holder_of(error.item_id)
        if url is None:
            if self._shared_state.is_of_dead(error.item_id):
                error.message += (
                    "; the orchestrator that made this id is gone, and nothing was kept of it: "
                    "begin anew"
                )
            return None
        self._shared_state.forwarded += 1
        return await self._forward(request, url)

    async def _forward(self, request: web.Request, url: str) -> web.StreamResponse:
        headers = _end_to_end(request.headers)
        headers[FORWARDED_HEADER] = "1"
        headers.setdefault("X-Correlation-Id", request[CONTEXT].correlation_id)
        body = request[CONTEXT].body
        data = body if body is not None else request.content if request.can_read_body else None
        try:
            reply = await self._client().request(
                request.method,
                f"{url}{request.raw_path}",
                headers=headers,
                data=data,
                allow_redirects=False,
            )
        except aiohttp.ClientConnectionError as failure:
            raise NotReady(
                "the orchestrator that has this does not answer; ask again in a moment"
            ) from failure
        async with reply:
            response = web.StreamResponse(status=reply.status, headers=_end_to_end(reply.headers))
            request[CONTEXT].is_forwarded = True
            await response.prepare(request)
            try:
                async for piece in reply.content.iter_any():
                    await response.write(piece)
            except aiohttp.ClientError as failure:
                raise ConnectionResetError("the holder's answer broke off") from failure
            await response.write_eof()
            return response

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # How long an answer may take is for its deadline to say.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                connector=aiohttp.TCPConnector(limit=0),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


FORWARDING = web.AppKey("forwarding", Forwarding)


def _end_to_end(headers: "CIMultiDict[str] | aiohttp.typedefs.LooseHeaders") -> "CIMultiDict[str]":
    """Headers without those that are about one connection only."""
    kept = CIMultiDict(headers)
    dropped = _HOP_BY_HOP.union(
        name.strip().lower() for name in kept.get("Connection", "").split(",")
    )
    for name in dropped:
        kept.popall(name, None)
    return kept
