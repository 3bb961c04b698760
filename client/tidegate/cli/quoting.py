"""``tidegate quote``: what it asks and prints."""

from typing import NamedTuple

from tidegate.cli.terminal import console, duration, print_json, table
from tidegate.client import Client
from tidegate.quotes import QuotedChance
from tidegate.requests import TaskOptions


class WantedQuote(NamedTuple):
    """What is to be quoted: a prompt, or its length in tokens; and a chance to reserve, if any, for
    ``hold_ms``."""

    prompt: str | None
    prompt_tokens: int | None
    reserve: float | None
    hold_ms: float
    options: TaskOptions


async def quote(client: Client, wanted: WantedQuote, *, as_json: bool) -> int:
    found = await client.quote(
        wanted.prompt,
        prompt_tokens=wanted.prompt_tokens,
        accept=wanted.reserve,
        hold=wanted.hold_ms,
        **wanted.options,
    )
    if as_json:
        print_json(found)
        return 0
    out = console()
    out.print(
        f"{found.model}: {found.prompt_tokens} prompt tokens, at most {found.max_tokens} to come"
    )
    columns = ("WITHIN", "CHANCE")
    out.print(table(columns, [_row(point) for point in found.curve], numbers=columns))
    if found.stated is not None:
        out.print(f"by your deadline: {_percent(found.stated.chance)}")
    offers = ", ".join(
        f"{duration(point.within_ms)} with {_percent(point.chance)}" for point in found.earliest
    )
    out.print(f"can be reserved: {offers}")
    if found.reservation is not None:
        held = found.reservation
        out.print(
            f"reserved with {_percent(held.chance)} for {duration(wanted.hold_ms)}: send the "
            f"request with X-Deadline: {held.deadline_unix_ms}"
        )
    return 0


def _row(point: QuotedChance) -> tuple[str, str]:
    return duration(point.within_ms), _percent(point.chance)


def _percent(chance: float) -> str:
    return f"{100 * chance:.0f} %"
