"""Requests for what another orchestrator has, handed on to it.

An id that is not known here may be known to another: the shared state says who has it, and that one
answers as if it had been asked itself, with the client's own headers and key. Whoever hangs up
here, hangs up there.

Of processes that share a port (``state.siblings``) a client cannot choose one. So what one of them
keeps for all is asked of that one, and what concerns all is asked of each.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from orchestrator.api.http.context import CONTEXT
from orchestrator.api.http.finding import Elsewhere, SiblingAnswer
from orchestrator.errors import NotReady, TidegateError

if TYPE_CHECKING:  # its library is an extra
    from orchestrator.state.shared_state import SharedState

FORWARDED_HEADER = "x-tidegate-forwarded"
"""Marks a request that another orchestrator has handed on, which is not handed on again. Its value
is the tag of the orchestrator that it is for, or ``TO_ANY``."""
TO_ANY = "1"
CONNECT_S = 2.0
SIBLING_S = 5.0
"""Longest wait for an answer of another process at the same port, in seconds."""
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


class Forwarding(Elsewhere):
    """Hands requests on. Its connections are closed with the application."""

    keeps_bodies = True

    def __init__(self, shared_state: "SharedState", led: Sequence[str]) -> None:
        """``led`` are paths below which one process answers for all of a port."""
        self._led = led
        self._shared_state = shared_state
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def answer(self, request: web.Request, error: TidegateError) -> web.StreamResponse | None:
        """The answer of whoever has what ``error`` says is unknown here; None where nobody has it,
        which ``error`` then says more of. Raises ``NotReady`` where it is about to be taken on, or
        its holder does not answer; ``NoCapacity`` where there is no room for it."""
        if not error.item_id:
            return None
        if asked_for := request.headers.get(FORWARDED_HEADER):
            was_here = asked_for not in (TO_ANY, self._shared_state.tasks.tag)
            if was_here or await self._shared_state.is_claimed(error.item_id):
                raise NotReady(
                    "the orchestrator that had this is gone, and another may take it on: ask again "
                    "in a moment"
                )
            return None
        holder = await self._shared_state.holder_of(error.item_id)
        if holder is None:
            if self._shared_state.is_of_dead(error.item_id):
                error.message += (
                    "; the orchestrator that made this id is gone, and nothing was kept of it: "
                    "begin anew"
                )
            return None
        self._shared_state.forwarded += 1
        return await self._forward(request, holder.url, holder.tag)

    async def of_one(self, request: web.Request) -> web.StreamResponse | None:
        """The answer of the process that answers such a request for all of a port; None where this
        one is to answer. Raises ``NotReady`` where that one breaks off."""
        siblings = self._shared_state.siblings
        if siblings is None or FORWARDED_HEADER in request.headers:
            return None
        url: str | None = None
        if self._is_led(request.path):
            url = siblings.lead()
        elif request.method == "POST" and (name := request.headers.get("Idempotency-Key")):
            url = siblings.keeper_of(name)
        if not url:
            return None
        try:
            return await self._forward(request, url, TO_ANY)
        except NotReady as not_ready:
            if isinstance(not_ready.__cause__, aiohttp.ClientConnectorError):
                return None  # it is gone, with what it had
            raise

    async def of_siblings(self, request: web.Request) -> list[SiblingAnswer]:
        """The answers of the other processes at this port to the same request; none to one that
        another has handed on. Those that are gone are left out: whoever takes their place begins
        anew. Raises ``NotReady`` where one does not answer."""
        siblings = self._shared_state.siblings
        if siblings is None or FORWARDED_HEADER in request.headers:
            return []
        asked = [self._ask(request, url) for url in siblings.urls()]
        return [answer for answer in await asyncio.gather(*asked) if answer is not None]

    def _is_led(self, path: str) -> bool:
        return any(path == led or path.startswith(f"{led}/") for led in self._led)

    async def _ask(self, request: web.Request, url: str) -> SiblingAnswer | None:
        headers = _handed_on(request, TO_ANY)
        headers.popall("Accept-Encoding", None)
        data, target = request[CONTEXT].body, f"{url}{request.raw_path}"
        try:
            async with (
                asyncio.timeout(SIBLING_S),
                self._client().request(request.method, target, headers=headers, data=data) as reply,
            ):
                return SiblingAnswer(reply.status, await reply.read())
        except aiohttp.ClientConnectorError:
            return None
        except (aiohttp.ClientError, TimeoutError) as failure:
            raise NotReady(
                "not all processes at this port have answered; send it again in a moment"
            ) from failure

    async def _forward(self, request: web.Request, url: str, tag: str) -> web.StreamResponse:
        headers = _handed_on(request, tag)
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
                raise ConnectionResetError(
                    "the other orchestrator's response ended early"
                ) from failure
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


def _handed_on(request: web.Request, tag: str) -> "CIMultiDict[str]":
    """Headers of a request as they are handed on to the orchestrator of that tag."""
    headers = _end_to_end(request.headers)
    headers[FORWARDED_HEADER] = tag
    headers.setdefault("X-Correlation-Id", request[CONTEXT].correlation_id)
    return headers


def _end_to_end(headers: "CIMultiDict[str] | aiohttp.typedefs.LooseHeaders") -> "CIMultiDict[str]":
    """Headers without those that are about one connection only."""
    kept = CIMultiDict(headers)
    dropped = _HOP_BY_HOP.union(
        name.strip().lower() for name in kept.get("Connection", "").split(",")
    )
    for name in dropped:
        kept.popall(name, None)
    return kept
