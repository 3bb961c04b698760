"""Conversations cut to what their model's context holds: ``truncation: auto``.

Instructions and the last turn of the user stay. Of the rest the oldest goes: first whole exchanges,
from one turn of the user to the next, then what the model did since the last one. A call goes
together with its result.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from orchestrator.tasks.job import Message

History = tuple[Message, ...]


async def truncated(history: History, fits: Callable[[History], Awaitable[bool]]) -> History:
    """The longest end of ``history`` that ``fits``; if none does, the shortest that may be left.

    ``fits`` is asked as often as the number of turns has binary digits.
    """
    if await fits(history):
        return history
    cuts = await asyncio.to_thread(cuts_of, history)
    if not cuts:
        return history
    low, high = 0, len(cuts) - 1
    while low < high:
        middle = (low + high) // 2
        if await fits(cut(history, cuts[middle])):
            high = middle
        else:
            low = middle + 1
    return cut(history, cuts[low])


def cut(history: History, place: int) -> History:
    """The turns from ``place`` on, behind those before it that must stay."""
    last = _last_of_user(history)
    kept = [
        turn
        for at, turn in enumerate(history[:place])
        if turn.role == "system" or (turn.role == "user" and at >= last)
    ]
    return (*kept, *history[place:])


def cuts_of(history: History) -> list[int]:
    """The places before which turns may be left out, the one that leaves out least first."""
    last = _last_of_user(history)
    made = {call.id: at for at, turn in enumerate(history) for call in turn.calls}
    cuts = []
    needed = len(history)
    """Place of the earliest call whose result comes later than the place looked at."""
    for at in range(len(history) - 1, 0, -1):
        turn = history[at]
        if turn.role == "tool":
            needed = min(needed, made.get(turn.call_id, at))
        if at <= needed and _begins(history, at, last):
            cuts.append(at)
    return cuts[::-1]


def _begins(history: Sequence[Message], at: int, last_of_user: int) -> bool:
    """Whether an exchange begins at a place, or a step of the model in the last one."""
    role, before = history[at].role, history[at - 1].role
    if at <= last_of_user:
        return role == "user" and before != "user"
    return role == "assistant" and before in ("assistant", "tool")


def _last_of_user(history: Sequence[Message]) -> int:
    """Where the user's last turn begins, which may be of several messages; -1 without any."""
    at = next((at for at in reversed(range(len(history))) if history[at].role == "user"), None)
    if at is None:
        return -1
    while at and history[at - 1].role == "user":
        at -= 1
    return at
