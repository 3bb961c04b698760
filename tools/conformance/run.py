"""A whole run: see whether the server can be tested, measure its pace, then each group of rules."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Final

import aiohttp

from . import VERSION, clocks, drain, error_shapes, expiry, hang_up, overload, partial, retries
from .budget import Budget, Effort, Spent, Unusable
from .pace import Pace, Trial, look, measure
from .report import Report
from .rules import Finding, Rule, Verdict, chosen
from .stillness import Stillness, watched
from .target import Target
from .wire import Wire

CHECKS: Final[dict[str, Callable[[Trial], Awaitable[list[Finding]]]]] = {
    "errors": error_shapes.check,
    "clock": clocks.check,
    "expiry": expiry.check,
    "partial": partial.check,
    "hangup": hang_up.check,
    "overload": overload.check,
    "retry": retries.check,
    "drain": drain.check,
}
"""Measurement of each group, in order."""
_KEPT_S: Final = 2.0
"""Seconds for which idle connections are used again, as clients do: fewer than any server's own."""
_VERSIONS: Final = ("/version", "/api/version")
"""Paths below the server's root that some servers tell their version at."""


async def examine(target: Target, effort: Effort | None = None, only: Sequence[str] = ()) -> Report:
    """Test a server by the rules named in ``only``, or by all.

    Raises ``Unusable`` where it cannot be tested at all, ``UnknownRule``.
    """
    effort = effort or Effort()
    rules = chosen(only)
    budget = Budget(effort)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_S)
    timeout = aiohttp.ClientTimeout(total=None)  # each request has a limit of its own
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        wire = Wire(http, target, budget)
        trial = await _begun(wire, effort)
        server = await _server(http, target)
        findings: list[Finding] = []
        for group in dict.fromkeys(rule.group for rule in rules):
            mine = [rule for rule in rules if rule.group == group]
            findings += await _checked(trial, CHECKS[group], mine)
        return Report(
            version=VERSION,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            url=target.url,
            model=target.model,
            deadline=str(target.deadline),
            server=server,
            pace=trial.pace.figures(),
            requests=budget.used,
            seconds=round(budget.took_s, 1),
            findings=findings,
        )


async def _begun(wire: Wire, effort: Effort) -> Trial:
    try:
        async with asyncio.timeout(wire.budget.left_s):
            await look(wire, effort)
            return Trial(wire, await measure(wire, effort), effort)
    except TimeoutError:
        raise Unusable(f"{wire.budget.out_of_time()}, and its pace was not measured yet") from None
    except Spent as reason:
        raise Unusable(f"{reason}, and its pace was not measured yet") from None


async def _checked(
    trial: Trial, check: Callable[[Trial], Awaitable[list[Finding]]], rules: Sequence[Rule]
) -> list[Finding]:
    """Findings for ``rules`` of one group; whatever stops the measurement is the reason that they
    could not be measured."""
    try:
        async with watched() as stillness, asyncio.timeout(trial.wire.budget.left_s):
            found = {finding.rule: finding for finding in await check(trial)}
        return [_fair(rule, found[rule.id], stillness, trial.pace) for rule in rules]
    except TimeoutError:
        reason = str(trial.wire.budget.out_of_time())
    except (Spent, Unusable) as error:
        reason = str(error)
    return [Finding(rule.id, Verdict.UNMEASURED, reason) for rule in rules]


def _fair(rule: Rule, finding: Finding, stillness: Stillness, pace: Pace) -> Finding:
    """Take nothing for broken that this client may have delayed itself."""
    if not rule.is_timed or stillness.worst_s <= pace.tolerance_s:
        return finding
    if finding.verdict is not Verdict.FAIL:
        return finding
    said = (
        f"{finding.said}; but this client itself stood still for {stillness.worst_s:.2f} s"
        " meanwhile: run it on a machine that does nothing else"
    )
    return Finding(rule.id, Verdict.UNMEASURED, said, finding.figures)


async def _server(http: aiohttp.ClientSession, target: Target) -> str:
    """What the server says that it is: its ``Server`` header and its version, where it has them."""
    told: list[str] = []
    root = target.url.rstrip("/").removesuffix("/v1")
    for path in _VERSIONS:
        try:
            async with asyncio.timeout(5.0), http.get(root + path) as response:
                told = told or [response.headers.get("Server", "")]
                if response.status == 200 and response.content_type == "application/json":
                    body = json.loads(await response.content.read(1 << 16))
                    told.append(f"version {body['version']}")
                    break
        except (TimeoutError, aiohttp.ClientError, ValueError, KeyError, TypeError):
            continue
    return " ".join(each for each in told if each) or "a server that does not name itself"
