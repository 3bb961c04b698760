"""Outcomes of open-loop requests, as clients judge them, in turns and cells.

A cell is one contestant at one load, with one or more turns. Policies of one orchestrator
(``perf.goodput``) and compared servers (``perf.peers``) both use them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Self

from perf.load.open_loop import Result, StreamRequest
from perf.report.bundle import Better, Figure

_WHOLE: Final = ("stop", "length")
"""Finish reasons of an answer that is complete."""
_SEED: Final = 11

Outcome = tuple[StreamRequest, Result]


def is_met(ask: StreamRequest, result: Result) -> bool:
    """Whether the whole answer came by the client's own deadline, and every part by its own."""
    whole = result.complete and result.finish in _WHOLE
    return whole and 1000 * result.end_s <= ask.deadline_ms and not result.missed


def is_refused(result: Result) -> bool:
    """Whether the server refused at once, or gave up before a first token."""
    return result.status not in (0, 200) and not result.first_s


def _end_of(ask: StreamRequest, result: Result) -> str:
    if result.complete:
        return "met" if is_met(ask, result) else result.missed or "late"
    if result.code and result.tokens:
        return f"{result.code} after tokens"
    return result.code or "unanswered"


@dataclass(frozen=True)
class OfferedTurn:
    """Requests that were due within ``window_s`` seconds. ``kinds`` has the kind of each of
    ``outcomes``, or is empty."""

    outcomes: Sequence[Outcome]
    window_s: float
    kinds: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        asks: Sequence[StreamRequest],
        results: Sequence[Result],
        warm_s: float,
        window_s: float,
        kinds: Sequence[str] = (),
    ) -> Self:
        """Turn of all requests except those due in the first ``warm_s``."""
        due = [number for number, ask in enumerate(asks) if ask.at_s >= warm_s]
        outcomes = [(asks[number], results[number]) for number in due]
        return cls(outcomes, window_s, [kinds[number] for number in due] if kinds else ())

    @cached_property
    def met(self) -> list[bool]:
        return [is_met(*outcome) for outcome in self.outcomes]

    @property
    def met_per_s(self) -> float:
        return sum(self.met) / self.window_s

    @property
    def tokens(self) -> int:
        return sum(result.tokens for _, result in self.outcomes)

    @property
    def waste(self) -> float:
        """Share of the tokens that went to requests which were not met. 0 to 1."""
        kept = sum(r.tokens for (_, r), met in zip(self.outcomes, self.met, strict=True) if met)
        return 1 - kept / self.tokens if self.tokens else 0.0

    @property
    def refused(self) -> float:
        """Share that was refused. 0 to 1."""
        return sum(is_refused(result) for _, result in self.outcomes) / max(1, len(self.outcomes))

    @property
    def ends(self) -> dict[str, int]:
        """Requests by how they ended: ``met``, ``late``, the part that was missed, ``unanswered``
        or the error's code."""
        return dict(Counter(_end_of(*outcome) for outcome in self.outcomes))

    def attainment(self, kind: str = "") -> float:
        """Share that was met, of all or of one kind. 0 to 1."""
        met = self.met
        if kind:
            met = [each for each, own in zip(met, self.kinds, strict=True) if own == kind]
        return sum(met) / max(1, len(met))

    def line(self) -> str:
        """One line of progress for people."""
        ends = ", ".join(f"{end} {count}" for end, count in sorted(self.ends.items()))
        return f"{self.met_per_s:.1f} met/s of {len(self.outcomes)} ({ends})"


@dataclass(frozen=True)
class Cell:
    """Turns of one contestant at one load. ``key`` and ``title`` are prefixes of figures' names.
    ``kinds`` get a share of their own. ``rate_key`` is the key of requests met per second, ``more``
    has figures of this benchmark only."""

    key: str
    load: str
    label: str
    turns: Sequence[OfferedTurn]
    kinds: Sequence[str] = ()
    rate_key: str = "met_per_s"
    more: Sequence[Figure] = field(default_factory=tuple)

    def ttft_ms(self) -> list[float]:
        """Milliseconds to the first token, of all turns' requests that had one."""
        return [1000 * r.first_s for turn in self.turns for _, r in turn.outcomes if r.first_s]

    def late_send_ms(self) -> float:
        """Largest delay in ms with which the generator sent a request."""
        return max(1000 * r.late_s for turn in self.turns for _, r in turn.outcomes)

    def line(self) -> str:
        """One line of progress for people, of the last turn."""
        return f"{self.load}, {self.label}: {self.turns[-1].line()}"

    def figures(self) -> list[Figure]:
        turns, what = self.turns, f"{self.load}, {self.label}"

        def of(key: str, label: str, unit: str, values: list[float], better: Better) -> Figure:
            return Figure.of(f"{self.key}.{key}", f"{what}: {label}", unit, values, better=better)

        figures = [
            self._rate(f"{what}: met per second"),
            of(
                "attainment", "met, of those offered", "", [t.attainment() for t in turns], "higher"
            ),
            of("refused", "refused", "", [turn.refused for turn in turns], "neither"),
            of("waste", "tokens of requests not met", "", [turn.waste for turn in turns], "lower"),
            of(
                "tokens_per_s",
                "tokens",
                "tokens/s",
                [turn.tokens / turn.window_s for turn in turns],
                "neither",
            ),
            of("late_send_ms", "generator late by", "ms", [self.late_send_ms()], "neither"),
        ]
        for kind in self.kinds:
            shares = [turn.attainment(kind) for turn in turns]
            figures.append(of(f"attainment_{kind}", f"met, of {kind}", "", shares, "higher"))
        for end in sorted({end for turn in turns for end in turn.ends}):
            shares = [turn.ends.get(end, 0) / len(turn.outcomes) for turn in turns]
            figures.append(
                of(f"end.{end.replace(' ', '_')}", f"ended: {end}", "", shares, "neither")
            )
        begun = [sum(bool(r.first_s) for _, r in turn.outcomes) / turn.window_s for turn in turns]
        figures.append(of("prompts_per_s", "first tokens", "requests/s", begun, "neither"))
        if ttft := self.ttft_ms():
            figures += [
                Figure.tail_of(
                    f"{self.key}.ttft_p{q}_ms", f"{what}: first token, p{q}", "ms", ttft, q
                )
                for q in (50, 99)
            ]
        return [*figures, *self.more]

    def _rate(self, label: str) -> Figure:
        """Requests met per second: over turns, or of the only one with a bootstrap interval."""
        key, unit = f"{self.key}.{self.rate_key}", "requests/s"
        if len(self.turns) > 1:
            rates = [turn.met_per_s for turn in self.turns]
            return Figure.of(key, label, unit, rates, better="higher")
        (turn,) = self.turns
        met = [float(each) for each in turn.met]

        def per_s(drawn: Sequence[float]) -> float:
            return sum(drawn) / turn.window_s

        return Figure.resampled(key, label, unit, met, per_s, better="higher", seed=_SEED)
