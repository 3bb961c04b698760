"""The rules of ``rules.md``, and what is found about them.

A rule is a sentence that applies to any server, whatever its name for a deadline. A server cannot
keep a deadline that it was never told: then the rule is not applicable, and the finding says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

NOT_TOLD: Final = "the server is told of no deadline: its clients hang up"
_TIMED: Final = ("expiry.stream", "expiry.whole", "partial.", "hangup.", "overload.")


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
    """The tolerance and its reason."""

    @property
    def group(self) -> str:
        return self.id.partition(".")[0]

    @property
    def is_timed(self) -> bool:
        """Whether it cannot be told to be broken where this client stood still meanwhile."""
        return self.id.startswith(_TIMED)


@dataclass(frozen=True, slots=True)
class Finding:
    """Outcome of a rule; ``said`` describes the observation, or why there is none."""

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


def chosen(names: Sequence[str]) -> tuple[Rule, ...]:
    """Rules by ids or names of groups; all of them without any. Raises ``ValueError``."""
    for name in set(names).difference(GROUPS, (rule.id for rule in RULES)):
        raise ValueError(
            f"there is no rule {name!r}: groups are {', '.join(GROUPS)}; --rules lists all"
        )
    return tuple(rule for rule in RULES if not names or {rule.id, rule.group} & set(names))


def judged(rule: str, is_kept: bool, said: str, **figures: float) -> Finding:
    return Finding(rule, Verdict.PASS if is_kept else Verdict.FAIL, said, figures)


def unmeasured(rule: str, said: str, **figures: float) -> Finding:
    return Finding(rule, Verdict.UNMEASURED, said, figures)


def inapplicable(said: str, *rules: str) -> list[Finding]:
    return [Finding(rule, Verdict.NOT_APPLICABLE, said) for rule in rules]
