"""Findings of a run as text for people and as JSON for programs."""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Final

from .rules import RULES, Finding, Rule, Verdict

SCHEMA: Final = 1
_INDENT: Final = " " * 41
PASSED, FAILED, NO_TEST, UNKNOWN = 0, 1, 2, 3
"""Exit statuses: every rule that applies was kept; one was broken; the server or the arguments
cannot be used; nothing was broken, but something could not be measured."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a run found, and about what."""

    version: str
    """Version of the rules."""
    created: str
    url: str
    model: str
    deadline: str
    """How a deadline was said."""
    server: str
    """What the server calls itself, as far as it does."""
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
        rules = _by_id()
        found = [
            {
                **asdict(each),
                "sentence": rules[each.rule].sentence,
                "figures": {name: value for name, value in each.figures.items() if isfinite(value)},
            }
            for each in self.findings
        ]
        return {"schema": SCHEMA, **asdict(self), "findings": found, "counts": self.counts()}

    def counts(self) -> dict[str, int]:
        """Number of rules by verdict."""
        counted = Counter(finding.verdict for finding in self.findings)
        return {verdict.value: counted[verdict] for verdict in Verdict}

    def text(self) -> str:
        """Table for a terminal."""
        rules = _by_id()
        head = [
            f"{self.url}, model {self.model}, {self.server}",
            f"deadline said by {self.deadline}; rules {self.version}, {self.created}",
            _pace(self.pace),
            "",
        ]
        lines = []
        for each in self.findings:
            lines.append(f"{each.verdict.upper():<21} {each.rule:<18} {rules[each.rule].sentence}")
            lines += textwrap.wrap(
                each.said, 110, initial_indent=_INDENT, subsequent_indent=_INDENT
            )
        counts = ", ".join(f"{count} {verdict}" for verdict, count in self.counts().items())
        foot = ["", f"{counts}; {self.requests} requests in {self.seconds:.0f} s"]
        return "\n".join([*head, *lines, *foot])


def _by_id() -> dict[str, Rule]:
    return {rule.id: rule for rule in RULES}


def _pace(pace: Mapping[str, float]) -> str:
    if not pace:
        return "its pace was not measured"
    return (
        f"alone: first text after {1000 * pace['first_s']:.0f} ms, {1000 * pace['gap_s']:.2g} ms a"
        f" token; at its capacity of {pace['streams']:g} streams: {pace['tokens_per_s']:.0f}"
        " tokens/s"
    )
