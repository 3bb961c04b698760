"""Requests of a real service: prompts, answers and arrivals from a trace.

Files have the columns of Azure's LLM inference traces (``TIMESTAMP, ContextTokens,
GeneratedTokens``; Patel et al., Splitwise, ISCA 2024). Token counts are divided to suit a small
engine, and fixed deadlines by the same factor, so that their ratio stays the same.
"""

import csv
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from perf.load.workload import Speed

PROMPT_SCALE, ANSWER_SCALE = 16, 4
_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(ValueError):
    """A file that cannot be read as a trace; the message has its name and the line."""


class Manner(StrEnum):
    """How clients choose their deadlines."""

    PROPORTIONAL = "proportional"
    """Deadline is a multiple of the request's own service time, which only an oracle knows."""
    CONSTANT = "constant"
    """Deadline is the same for all requests of an application, however long the answer."""
    PARTS = "parts"
    """Deadlines are for the first token, and for the gaps between tokens."""


class TraceRow(NamedTuple):
    """One request of a trace; ``at_s`` counts from the first."""

    at_s: float
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Application:
    """A kind of client. Times are ms of the unscaled trace; it sends ``share`` of the requests."""

    name: str
    share: float
    deadline_ms: float
    first_token_ms: float
    token_gap_ms: float


CHAT = (
    Application("chat", 0.8, 10_000.0, 2_000.0, 100.0),
    Application("batch", 0.2, 60_000.0, 10_000.0, 400.0),
)
CODE = (Application("code", 1.0, 2_000.0, 1_000.0, 100.0),)


class TracedRequest(NamedTuple):
    """One request of a load; deadlines that are not stated are infinite."""

    at_s: float
    prompt_tokens: int
    answer_tokens: int
    deadline_ms: float
    first_token_ms: float
    token_gap_ms: float
    application: Application


def read_trace(file: Path) -> list[TraceRow]:
    """The requests of ``file`` in order of time. Raises ``TraceError``."""
    rows: list[TraceRow] = []
    try:
        with file.open(newline="") as lines:
            reader = csv.DictReader(lines)
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise TraceError(f"{file}: no column {missing[0]}; expected {', '.join(_COLUMNS)}")
            for record in reader:
                try:
                    at = datetime.fromisoformat(record["TIMESTAMP"][:26]).timestamp()
                    row = TraceRow(at, int(record["ContextTokens"]), int(record["GeneratedTokens"]))
                except (TypeError, ValueError) as error:
                    raise TraceError(f"{file}, line {reader.line_num}: {error}") from None
                if row.prompt_tokens > 0 and row.answer_tokens > 0:
                    rows.append(row)
    except OSError as error:
        raise TraceError(f"{file}: {error.strerror}") from None
    if len(rows) < 2:
        raise TraceError(f"{file}: no requests in it")
    rows.sort()
    return [row._replace(at_s=row.at_s - rows[0].at_s) for row in rows]


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """Loads from a trace's requests. Every request states the same generous cap.

    ``is_poisson`` draws random arrivals. Otherwise the trace's arrivals are scaled to the requested
    rate, including bursts. A proportional deadline is one of ``patience`` times the request's own
    service time at ``speed``, plus ``margin_ms``.
    """

    rows: Sequence[TraceRow]
    speed: Speed
    manner: Manner = Manner.PROPORTIONAL
    is_poisson: bool = False
    applications: tuple[Application, ...] = CHAT
    patience: tuple[float, ...] = (1.5, 3.0, 6.0)
    margin_ms: float = 250.0
    prompt_scale: int = PROMPT_SCALE
    answer_scale: int = ANSWER_SCALE

    @property
    def cap_tokens(self) -> int:
        """The ``max_tokens`` of every request: more than the longest answer."""
        return self.scaled_answer(max(row.answer_tokens for row in self.rows)) * 5 // 4 + 1

    def scaled_answer(self, tokens: int) -> int:
        return max(1, round(tokens / self.answer_scale))

    def requests(self, per_s: float, seconds: float, seed: int) -> Iterator[TracedRequest]:
        """``per_s`` · ``seconds`` requests from a random position in the trace, in order of time.

        Seeds differ in the place, the gaps (when Poisson) and the clients' patience.
        """
        rng = random.Random(seed)
        count = max(1, round(per_s * seconds))
        first = rng.randrange(len(self.rows))
        rows = [self.rows[(first + i) % len(self.rows)] for i in range(count + 1)]
        if self.is_poisson:
            times = sorted(rng.uniform(0.0, seconds) for _ in range(count))
        else:
            gaps = [max(0.0, after.at_s - row.at_s) for row, after in pairwise(rows)]
            factor = seconds / (sum(gaps) or 1.0)
            times, at_s = [], 0.0
            for gap in gaps:
                times.append(at_s)
                at_s += gap * factor
        weights = [application.share for application in self.applications]
        for at_s, row in zip(times, rows, strict=False):
            yield self._one(at_s, row, rng, rng.choices(self.applications, weights)[0])

    def _one(
        self, at_s: float, row: TraceRow, rng: random.Random, app: Application
    ) -> TracedRequest:
        prompt = max(1, round(row.prompt_tokens / self.prompt_scale))
        answer = self.scaled_answer(row.answer_tokens)
        never = float("inf")
        whole = first = gap = never
        patience = rng.choice(self.patience)
        match self.manner:
            case Manner.PROPORTIONAL:
                whole = patience * self.speed.service_ms(prompt, answer) + self.margin_ms
            case Manner.CONSTANT:
                whole = app.deadline_ms / self.answer_scale
            case Manner.PARTS:
                first = app.first_token_ms / self.answer_scale
                gap = app.token_gap_ms / self.answer_scale
        return TracedRequest(at_s, prompt, answer, whole, first, gap, app)
