"""A whole run: check that the server can be tested, measure its pace, then each group of rules."""

import asyncio
import textwrap
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import isfinite
from typing import Any, Final

import aiohttp

from . import VERSION, expiry, hangup, overload
from .rules import RULES, Finding, Rule, Verdict, chosen, unmeasured
from .server import Effort, Server, Unusable
from .target import Target

CHECKS: Final[dict[str, Callable[[Server], Awaitable[list[Finding]]]]] = {
    "expiry": expiry.check,
    "partial": expiry.check_partial,
    "hangup": hangup.check,
    "overload": overload.check,
}
"""Measurement of each group."""
PASSED, FAILED, NO_TEST, UNKNOWN = 0, 1, 2, 3
"""Exit statuses: every rule that applies was kept; one was broken; the server or the arguments
cannot be used; nothing was broken, but something could not be measured."""
_KEPT_S: Final = 2.0
"""Seconds for which idle connections are reused, as in clients: fewer than any server's limit."""
_LOOK_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Report:
    """What a run found, and about what: the rules' version, how a deadline was said, what the
    server calls itself, as far as it does."""

    version: str
    created: str
    url: str
    model: str
    deadline: str
    server: str
    pace: Mapping[str, float]
    requests: int
    seconds: float
    findings: Sequence[Finding]

    @property
    def status(self) -> int:
        """Exit status."""
        verdicts = {finding.verdict for finding in self.findings}
        if Verdict.FAIL in verdicts:
            return FAILED
        return UNKNOWN if Verdict.UNMEASURED in verdicts else PASSED

    def json(self) -> dict[str, Any]:
        """Plain data for JSON."""
        found = []
        for each in self.findings:
            figures = {name: value for name, value in each.figures.items() if isfinite(value)}
            found.append(asdict(each) | {"figures": figures})
        return {"schema": 2, **asdict(self), "findings": found}

    def text(self) -> str:
        """Table for a terminal."""
        sentences = {rule.id: rule.sentence for rule in RULES}
        lines = [
            f"{self.url}, model {self.model}, {self.server}",
            f"deadline said by {self.deadline}; rules {self.version}, {self.created}",
            ", ".join(f"{name} {value:.3g}" for name, value in self.pace.items()),
            "",
        ]
        for each in self.findings:
            lines.append(f"{each.verdict.upper():<21} {each.rule:<18} {sentences[each.rule]}")
            lines.append(textwrap.indent(textwrap.fill(each.said, 69), " " * 41))
        counted = Counter(finding.verdict for finding in self.findings)
        counts = ", ".join(f"{counted[verdict]} {verdict}" for verdict in Verdict)
        return "\n".join(
            [*lines, "", f"{counts}; {self.requests} requests in {self.seconds:.0f} s"]
        )


class Stillness:
    """Measures how long this client itself stalled: the server is not to blame for that time."""

    worst_s = 0.0

    async def watch(self) -> None:
        """Measure until cancelled."""
        clock_ = asyncio.get_running_loop().time
        while True:
            began = clock_()
            await asyncio.sleep(_LOOK_S)
            self.worst_s = max(self.worst_s, clock_() - began - _LOOK_S)


async def examine(target: Target, effort: Effort | None = None, only: Sequence[str] = ()) -> Report:
    """Test a server by the rules named in ``only``, or by all.

    Raises ``Unusable`` if it cannot be tested at all, and ``ValueError``.
    """
    rules = chosen(only)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_S)
    timeout = aiohttp.ClientTimeout(total=None)  # each request has its own limit
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        server, findings = Server(http, target, effort or Effort()), list[Finding]()
        try:
            async with asyncio.timeout(server.left_s):
                await server.measure()
        except TimeoutError:
            raise Unusable(f"{server.out_of_time}, and its pace was not measured yet") from None
        for group in dict.fromkeys(rule.group for rule in rules):
            mine = [rule for rule in rules if rule.group == group]
            findings += await _checked(server, CHECKS[group], mine)
        return Report(
            version=VERSION,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            url=target.url,
            model=target.model,
            deadline=str(target.deadline),
            server=server.name or "a server that does not name itself",
            pace=server.pace(),
            requests=server.used,
            seconds=round(server.clock() - server.began, 1),
            findings=findings,
        )


async def _checked(
    server: Server, check: Callable[[Server], Awaitable[list[Finding]]], rules: Sequence[Rule]
) -> list[Finding]:
    """Findings for ``rules`` of one group; what stops a measurement is why there is none."""
    stillness = Stillness()
    watching = asyncio.create_task(stillness.watch())
    try:
        async with asyncio.timeout(server.left_s):
            found = {finding.rule: finding for finding in await check(server)}
    except TimeoutError:
        return [unmeasured(rule.id, server.out_of_time) for rule in rules]
    except Unusable as error:
        return [unmeasured(rule.id, str(error)) for rule in rules]
    finally:
        watching.cancel()
        await asyncio.wait([watching])
    return [_fair(rule, found[rule.id], stillness.worst_s, server) for rule in rules]


def _fair(rule: Rule, finding: Finding, still_s: float, server: Server) -> Finding:
    """Do not count a rule as broken if this client may have caused the delay."""
    is_fair = not rule.is_timed or still_s <= server.tolerance_s
    if is_fair or finding.verdict is not Verdict.FAIL:
        return finding
    why = f"this client itself stalled for {still_s:.2f} s"
    said = f"{finding.said}; but {why}: run it on a machine that does nothing else"
    return unmeasured(rule.id, said, **finding.figures)
