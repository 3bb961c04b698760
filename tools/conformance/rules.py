"""Rules of the contract, each with what is measured, the tolerance, and why that much.

A rule is a sentence that holds for any server, whatever it calls a deadline. What a server was
never told it cannot keep: then a rule is not applicable, and the finding says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final


class Verdict(StrEnum):
    """Outcome of a rule."""

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
    why: str
    is_timed: bool = False
    """Whether it cannot be told to be broken where this client stood still meanwhile."""

    @property
    def group(self) -> str:
        return self.id.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Finding:
    """Outcome of the rule ``rule``; ``said`` is what was seen, or why nothing was, in words."""

    rule: str
    verdict: Verdict
    said: str
    figures: Mapping[str, float] = field(default_factory=dict)


_STEP: Final = (
    "100 ms and three of the longest gaps between tokens seen before, median of the rounds"
)
_STEP_WHY: Final = (
    "a server looks at its clock between two steps of its model; the rest is this client's network"
    " and scheduling"
)

RULES: Final = (
    Rule(
        "errors.status",
        "A request that cannot be read is refused with a 4xx status, streamed or not.",
        "status of a body that is not JSON, of messages that are a number, of a max_tokens that is"
        " a word",
        "none",
        "clients retry what is 5xx and give up what is 4xx",
    ),
    Rule(
        "errors.shape",
        "An error's body is OpenAI's error object.",
        "the bodies of those answers: JSON, `error.message` a text",
        "none",
        "the official SDKs read the message from there",
    ),
    Rule(
        "clock.date",
        "Answers have a Date header, by a clock that agrees with the client's.",
        "the header, less the client's clock in the middle of the round trip, the latest of three"
        " in more than a second",
        "2 s and the round trip",
        "RFC 9110 (6.6.1) asks for it; it has whole seconds, and many servers write it once a"
        " second; where clocks differ an absolute deadline means something else to each side",
    ),
    Rule(
        "clock.absolute",
        "An absolute deadline is kept by the server's own clock.",
        "with a deadline by the server's Date: far away, a short answer is whole; close, a long one"
        " ends",
        "1 s, and that of expiry.stream",
        "Date has whole seconds",
        is_timed=True,
    ),
    Rule(
        "clock.past",
        "An absolute deadline of an hour ago is refused without an answer.",
        "status and text",
        "none",
        "nobody can want it any more",
    ),
    Rule(
        "expiry.stream",
        "A stream ends, whole or not, by its deadline.",
        "its end after its deadline, of answers that would take several times as long; a refusal"
        " is an end",
        _STEP,
        _STEP_WHY,
        is_timed=True,
    ),
    Rule(
        "expiry.whole",
        "An answer that is not streamed comes, or an error in its place, by its deadline.",
        "as expiry.stream, without streaming",
        _STEP,
        _STEP_WHY,
        is_timed=True,
    ),
    Rule(
        "expiry.told",
        "An answer that its deadline ended can be told from a whole one.",
        "of answers that ended early: an error object, in a body or an event, or a finish_reason"
        " that is neither stop nor length",
        "none",
        "half of an answer taken for a whole one is worse than none",
    ),
    Rule(
        "expiry.past",
        "A deadline that is over on arrival is refused before any text.",
        "status and text of a request with 1 ms",
        "none",
        "nothing can be made of it in time, and whatever is made costs others",
    ),
    Rule(
        "expiry.unreadable",
        "A deadline that cannot be read is refused, not passed over.",
        "status of a request whose deadline is the word soon",
        "none",
        "who misspells a deadline waits for ever without knowing",
    ),
    Rule(
        "partial.answer",
        "Who asks for what there is at the deadline gets it, in time and well-formed.",
        "end, text and finish_reason of answers that would take several times as long, streamed and"
        " not",
        _STEP,
        _STEP_WHY,
        is_timed=True,
    ),
    Rule(
        "hangup.stream",
        "What a stream held serves others once its client has hung up.",
        "the time that a set of short streams takes right after a set of long ones was hung up,"
        " less the time on an idle server",
        "a tenth of what the same set takes longer beside the long ones, or 100 ms and three gaps"
        " under load, whichever is more",
        "seen from outside alone; what has not been freed would cost as much as beside them",
        is_timed=True,
    ),
    Rule(
        "hangup.whole",
        "What an answer that is not streamed held serves others once its client has hung up.",
        "as hangup.stream, where the long answers are not streamed",
        "as hangup.stream",
        "many clients ask without streaming, and their timeouts are hang-ups",
        is_timed=True,
    ),
    Rule(
        "overload.met",
        "At twice the capacity, a good part of the requests is still met.",
        "share of requests whole by the deadline, which is twice an answer's time at capacity;"
        " requests of the first such time do not count",
        "25 %",
        "half could be met at best; half of that leaves room for any order of service but collapse",
        is_timed=True,
    ),
    Rule(
        "overload.early",
        "Who will not be met hears so early.",
        "share, of requests not met, that had an error by half of their deadline",
        "50 %",
        "who hears early can go elsewhere; a prediction may err",
        is_timed=True,
    ),
    Rule(
        "overload.waste",
        "Most of what is made under overload is for requests that are met.",
        "share of received tokens that belonged to requests not met",
        "50 %",
        "at twice the capacity that is what serving at random would waste",
        is_timed=True,
    ),
    Rule(
        "overload.ends",
        "Under overload, too, requests end by their deadline.",
        "share of requests that had ended, in whatever way, by the deadline and the tolerance",
        "100 ms and three gaps under load; 95 % of requests",
        "this client is busy then as well",
        is_timed=True,
    ),
    Rule(
        "overload.recovers",
        "When the overload is over the service is as before.",
        "time until a lone request has its first token about as fast as before",
        "one deadline of the overload",
        "nothing of it can be worth anything any more",
        is_timed=True,
    ),
    Rule(
        "retry.said",
        "A refusal for lack of room says when to come back.",
        "Retry-After of answers with 429 or 503 to a burst: seconds or a date",
        "none",
        "without it clients guess, and come back all at once",
    ),
    Rule(
        "retry.honest",
        "Who comes back when told is served.",
        "of five refused requests: the status of the same request, sent again after what it was"
        " told, when nothing else is sent",
        "one of five",
        "a server can only guess how long the answers before will be",
    ),
    Rule(
        "retry.close",
        "A client is not sent away for much longer than needed.",
        "what it was told, beside when a client that asks all the time is served",
        "four times as long, and never less than 2 s",
        "Retry-After has whole seconds, and a server may want to be left alone for a while",
    ),
    Rule(
        "drain.running",
        "What runs when a drain begins ends whole.",
        "streams that began before the command that drains",
        "none",
        "a planned stop is no reason to lose work",
    ),
    Rule(
        "drain.refuses",
        "What comes while it drains is refused or served, never left hanging.",
        "a request after the command: a refusal, a refused connection, or a whole answer",
        "none",
        "clients can go elsewhere only when they are told",
    ),
)
"""Rules in the order in which they are measured."""

GROUPS: Final = tuple(dict.fromkeys(rule.group for rule in RULES))


class UnknownRule(ValueError):
    """No rule and no group has this name; the message lists what there is."""


def chosen(names: Sequence[str]) -> tuple[Rule, ...]:
    """Rules by ids or names of groups; all of them without any. Raises ``UnknownRule``."""
    known = {*GROUPS, *(rule.id for rule in RULES)}
    for name in names:
        if name not in known:
            raise UnknownRule(
                f"there is no rule {name!r}: groups are {', '.join(GROUPS)}; --rules lists all"
            )
    return tuple(rule for rule in RULES if not names or {rule.id, rule.group} & set(names))


def table() -> str:
    """All rules as a table in Markdown."""
    rows = [
        f"| `{rule.id}` | {rule.sentence} | {rule.measured} | {rule.tolerance}: {rule.why} |"
        for rule in RULES
    ]
    head = ["| rule | what holds | what is measured | tolerance, and why |", "|---|---|---|---|"]
    return "\n".join([*head, *rows])
