"""Answers that other processes have: none, unless a room puts its own ``Elsewhere`` in place.

An orchestrator that shares a state asks the one that has what is unknown here, and the other
processes at its port (``orchestrator.state.forwarding``). One that is alone asks nobody.
"""

from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from orchestrator.errors import NotReady, TidegateError


class SiblingAnswer(NamedTuple):
    """The answer of another process at the same port."""

    status: int
    body: bytes


class Elsewhere:
    """Other processes, as far as they answer requests for this one: here are none."""

    keeps_bodies = False
    """Whether a request may be sent on, so that its body is kept until it is answered."""

    async def close(self) -> None:
        """Close all connections."""

    async def answer(self, request: web.Request, error: TidegateError) -> web.StreamResponse | None:
        """The answer of whoever has what ``error`` says is unknown here; None where nobody has it.
        Raises ``NotReady`` where it is about to be taken on, or its holder does not answer;
        ``NoCapacity`` where there is no room for it."""
        return None

    async def of_one(self, request: web.Request) -> web.StreamResponse | None:
        """The answer of the process that answers such a request for all of a port; None where this
        one is to answer. Raises ``NotReady`` where that one breaks off."""
        return None

    async def of_siblings(self, request: web.Request) -> list[SiblingAnswer]:
        """The answers of the other processes at this port to the same request. Raises ``NotReady``
        where one does not answer."""
        return []


ELSEWHERE = web.AppKey("elsewhere", Elsewhere)


async def told_by_siblings(request: web.Request) -> list[Any]:
    """What the other processes at this port answer to the same request, decoded from JSON; those
    that have no such thing are left out. Raises ``NotReady`` where one does not answer, or
    refuses."""
    answers = await request.app[ELSEWHERE].of_siblings(request)
    if any(answer.status >= 400 and answer.status != 404 for answer in answers):
        raise NotReady("not all processes at this port have done it; send it again in a moment")
    return [msgspec.json.decode(answer.body) for answer in answers if answer.status < 400]
