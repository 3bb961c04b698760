"""The requests of ``perf.goodput``: sizes, arrivals and deadlines, from a trace or random."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perf import SEED
from perf.load.open_loop import NEVER_MS, StreamRequest
from perf.load.trace import (
    ANSWER_SCALE,
    CHAT,
    CODE,
    PROMPT_SCALE,
    Application,
    Manner,
    TracedRequest,
    TraceLoad,
    TraceRow,
    read_trace,
)
from perf.load.workload import Sizes, Speed
from worker.runner.synthetic import length_ids

LOG_NORMAL = "log-normal"
"""Name of the load without a trace."""
_PROMPTS = Sizes(median=48, sigma=0.8, least=8, most=256)
_ANSWERS = Sizes(median=24, sigma=0.7, least=4, most=96)
_ROWS = 4000
_FRESH = random.Random()
_BURST = 0.4
"""A window counts as one burst if a tenth of it has at least this share of its requests. Of 30
windows of the code trace at 2 × an H100, 9 were bursts; of conversations, none."""


@dataclass(frozen=True, slots=True)
class LoadSource:
    """Source of sizes and arrivals, in a trace's units."""

    name: str
    rows: Sequence[TraceRow]
    applications: tuple[Application, ...]


def source_of(file: Path) -> LoadSource:
    """Source of a trace. The file's name tells if its clients write code; otherwise they chat."""
    name = "code" if "code" in file.stem else file.stem.rpartition("-")[2]
    return LoadSource(name, read_trace(file), CODE if name == "code" else CHAT)


def log_normal(seed: int) -> LoadSource:
    """Source of random mixed requests: most are short, some are long."""
    rng = random.Random(seed)
    rows = [
        TraceRow(float(i), PROMPT_SCALE * _PROMPTS.draw(rng), ANSWER_SCALE * _ANSWERS.draw(rng))
        for i in range(_ROWS)
    ]
    return LoadSource(LOG_NORMAL, rows, CHAT)


@dataclass(frozen=True, slots=True)
class DrawnLoad:
    """Load with token ids as prompts, new ones for every prompt.

    For synthetic engines, the answer's length is random and encoded in the prompt's last ids. A
    request states the same generous cap as all others, or its true length, which no real client
    knows. With ``has_own_ends``, a model samples answers from its whole vocabulary, and ends them
    at an end token.
    """

    trace: TraceLoad
    model: str
    vocab_size: int
    has_own_ends: bool = False

    def asks(
        self, per_s: float, seconds: float, seed: int, *, knows_lengths: bool = False
    ) -> list[StreamRequest]:
        return [
            _ask(request, self._body(request, knows_lengths))
            for request in self.trace.requests(per_s, seconds, seed)
        ]

    def seeds(self, per_s: float, seconds: float, count: int) -> list[int]:
        """Seeds from ``SEED`` on. Those whose window is one burst of the trace come last."""
        tried = range(SEED, SEED + 20 * count)
        return sorted(tried, key=lambda seed: self.is_burst(per_s, seconds, seed))[:count]

    def is_burst(self, per_s: float, seconds: float, seed: int) -> bool:
        times = [one.at_s for one in self.trace.requests(per_s, seconds, seed)]
        tenths = Counter(int(10 * at_s / seconds) for at_s in times)
        return max(tenths.values()) > max(2, _BURST * len(times))

    def _body(self, request: TracedRequest, knows_lengths: bool) -> dict[str, object]:
        # New ids each time, independent of the seed, so that no policy profits from the cache
        # entries of the policy before it.
        length = request.answer_tokens
        ends = [] if self.has_own_ends else length_ids(length)
        own = _FRESH.choices(
            range(16, self.vocab_size), k=max(0, request.prompt_tokens - len(ends))
        )
        return {
            "model": self.model,
            "prompt": [*own, *ends],
            "max_tokens": length if knows_lengths else self.trace.cap_tokens,
            "ignore_eos": knows_lengths,
            "temperature": 1 if self.has_own_ends else 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def at_once(
    load: DrawnLoad, count: int, seed: int, *, knows_lengths: bool = False
) -> list[StreamRequest]:
    """``count`` simultaneous requests without deadlines, to measure the service's capacity."""
    asks = load.asks(float(count), 1.0, seed, knows_lengths=knows_lengths)
    return [StreamRequest(0.0, NEVER_MS, ask.body) for ask in asks]


def drawn_load(
    source: LoadSource,
    speed: Speed,
    manner: Manner,
    model: str,
    vocab_size: int,
    *,
    is_poisson: bool,
    has_own_ends: bool = False,
) -> DrawnLoad:
    """Load of ``source``. For a synthetic engine, its sizes are divided; for a model
    (``has_own_ends``), they are unchanged."""
    trace = TraceLoad(
        source.rows,
        speed,
        manner,
        is_poisson=is_poisson,
        applications=source.applications,
        prompt_scale=1 if has_own_ends else PROMPT_SCALE,
        answer_scale=1 if has_own_ends else ANSWER_SCALE,
    )
    return DrawnLoad(trace, model, vocab_size, has_own_ends)


def _ask(request: TracedRequest, body: dict[str, object]) -> StreamRequest:
    return StreamRequest(
        request.at_s,
        _ms(request.deadline_ms),
        body,
        _ms(request.first_token_ms),
        _ms(request.token_gap_ms),
    )


def _ms(deadline_ms: float) -> float:
    return min(round(deadline_ms, 1), NEVER_MS)
