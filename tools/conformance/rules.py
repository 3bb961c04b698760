"""The rules of ``rules.md``, and what is found about them.

A rule is a sentence that holds for any server, with any spelling of a deadline. A rule is not
applicable if the server was never told what it would have to keep, and the finding says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

NOT_TOLD: Final = "the server knows no deadline: its clients hang up"
_TIMED: Final = (
    "expiry.stream",
    "expiry.whole",
    "partial.",
    "hangup.",
    "overload.",
)


class Verdict(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    NOT_APPLICABLE = "not applicable"
    UNMEASURED = "could not be measured"


@dataclass(frozen=True, slots=True)
class Rule:
    """One promise; ``id`` is its group, a dot and its name."""

    id: str
    sentence: str
    measured: str
    tolerance: str
    """How much, and why that much."""

    @property
    def group(self) -> str:
        return self.id.partition(".")[0]

    @property
    def is_timed(self) -> bool:
        """Whether it cannot be called broken if this client stalled."""
        return self.id.startswith(_TIMED)


@dataclass(frozen=True, slots=True)
class Finding:
    """Outcome of a rule; ``said`` is what was seen, or why nothing was, in words."""

    rule: str
    verdict: Verdict
    said: str
    figures: Mapping[str, float] = field(default_factory=dict)


def table() -> str:
    """All rules as a table in Markdown."""
    return Path(__file__).with_name("rules.md").read_text().strip()


RULES: Final = tuple(
    Rule(id.strip("` "), *map(str.strip, parts))
    for id, *parts in (line.strip("|").split(" | ") for line in table().splitlines()[2:])
)
"""Rules in the order in which they are measured."""
GROUPS: Final = tuple(dict.fromkeys(rule.group for rule in RULES))


class UnknownRule(ValueError):
    """No rule and no group has this name; the message lists what there is."""


def chosen(names: Sequence[str]) -> tuple[Rule, ...]:
    """Rules by ids or names of groups; all of them without any. Raises ``UnknownRule``."""
    for name in set(names).difference(GROUPS, (rule.id for rule in RULES)):
        raise UnknownRule(
            f"there is no rule {name!r}: groups are {', '.join(GROUPS)}; --rules lists all"
        )
    return tuple(rule for rule in RULES if not names or {rule.id, rule.group} & set(names))


def judged(rule: str, is_kept: bool, said: str, **figures: float) -> Finding:
    return Finding(rule, Verdict.PASS if is_kept else Verdict.FAIL, said, figures)


def unmeasured(rule: str, said: str, **figures: float) -> Finding:
    return Finding(rule, Verdict.UNMEASURED, said, figures)


def inapplicable(said: str, *rules: str) -> list[Finding]:
    return [Finding(rule, Verdict.NOT_APPLICABLE, said) for rule in rules]
