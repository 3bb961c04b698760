"""How fast the server is, alone and at its capacity: every time of the run is made of that."""

import asyncio
import json
import math
import statistics
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

from .budget import Effort, Unusable
from .target import Saying, Target
from .wire import Answer, Wire, together

_LONE_TOKENS: Final = 32
_FEWEST, _MOST = 16, 128
"""Tokens of a short answer."""
_WORTH: Final = 1.15
"""More streams are taken for as long as a doubling, or the next one, makes at least so many times
the tokens: one wave alone may have met a busy moment."""
_VAIN: Final = 2
"""Doublings in vain after which the capacity is known."""
_SLACK_S: Final = 0.1
_FAR_S: Final = 120.0
"""A deadline that an answer of some tokens meets anywhere."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What was measured before the rules."""

    first_s: float
    """Median time to the first text, alone."""
    gap_s: float
    """Median time per token, alone."""
    longest_gap_s: float
    """Longest time between two texts, alone."""
    busy_gap_s: float
    """Longest time between two texts at capacity, median over the streams."""
    short: int
    """Tokens of a short answer."""
    longest: int
    """Tokens of the longest answer that the server takes."""
    streams: int
    """Streams at once at which more of them make hardly more tokens."""
    tokens_per_s: float
    """Tokens per second then."""
    answer_s: float
    """Time of a short answer then, median over the streams."""

    @property
    def tolerance_s(self) -> float:
        return _SLACK_S + 3 * self.longest_gap_s

    @property
    def busy_tolerance_s(self) -> float:
        return _SLACK_S + 3 * max(self.longest_gap_s, self.busy_gap_s)

    @property
    def longest_s(self) -> float:
        """Time of the longest answer, alone."""
        return self.first_s + self.longest * self.gap_s

    def figures(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Trial:
    """Everything that a measurement needs."""

    wire: Wire
    pace: Pace
    effort: Effort

    @property
    def target(self) -> Target:
        return self.wire.target

    def cut_s(self) -> float:
        """A deadline that cuts the longest answer: long enough for some text. Raises ``Unusable``
        where no answer is long enough."""
        pace = self.pace
        wanted = max(self.effort.least_deadline_s, 3 * pace.first_s + 20 * pace.gap_s)
        cut = min(wanted, pace.longest_s / 3)
        if cut < pace.first_s + 2 * pace.gap_s:
            raise Unusable(
                f"its longest answer takes {pace.longest_s:.3g} s, too little to be cut by a"
                " deadline"
            )
        return round(cut, 3)  # what headers can say

    def told(self, left_s: float) -> tuple[Saying, str]:
        """How the deadline in ``left_s`` is stated."""
        saying = self.target.deadline
        return saying, saying.said(left_s)

    async def wave(self) -> float:
        """Seconds that a set of short streams takes, one on each stream of the capacity; in
        proportion where some were not served, as long as this run waits where none was."""
        count, limit_s = self.pace.streams, self.effort.patience_s
        self.wire.budget.need(count)
        began = self.wire.clock()
        answers = await together(self.wire.begin(self.pace.short, limit_s) for _ in range(count))
        took_s = self.wire.clock() - began
        whole = sum(answer.is_whole for answer in answers)
        return took_s * count / whole if whole else limit_s

    async def settle(self, limit_s: float) -> float:
        """Seconds until a lone request is about as fast as at first; ``inf`` after ``limit_s``."""
        began, normal_s = self.wire.clock(), 2 * self.pace.first_s + self.pace.tolerance_s
        while (passed_s := self.wire.clock() - began) < limit_s:
            answer = await self.wire.chat(1, limit_s - passed_s)
            took_s = min(answer.first_s, answer.end_s)
            if answer.is_whole and took_s <= normal_s:
                return max(0.0, self.wire.clock() - began - took_s)
            if not answer.is_whole:
                await asyncio.sleep(normal_s)
        return math.inf


async def look(wire: Wire, effort: Effort) -> None:
    """See that the server is one that can be tested. Raises ``Unusable``."""
    listed = await wire.get("/models", effort.patience_s)
    _check_models(listed, wire.target)
    answer = await wire.chat(8, effort.patience_s, stream=False)
    if answer.status in (400, 422) and wire.fields:
        wire.fields = {}  # it refuses what it does not know: its answers end by themselves
        answer = await wire.chat(8, effort.patience_s, stream=False)
    if answer.status in (401, 403):
        raise Unusable(f"the server wants another key: {answer.outcome()}")
    if not answer.is_whole:
        raise Unusable(f"a chat of 8 tokens with model {wire.target.model!r}: {answer.outcome()}")
    saying = wire.target.deadline
    if saying.is_told:
        told = saying, saying.said(_FAR_S)
        answer = await wire.chat(8, effort.patience_s, stream=False, told=told)
        if not answer.is_whole:
            raise Unusable(
                f"a chat of 8 tokens with a deadline of {_FAR_S:g} s, said by '{saying}':"
                f" {answer.outcome()}; is it said as this server expects?"
            )


def _check_models(listed: Answer, target: Target) -> None:
    if listed.is_hung_up:
        raise Unusable(f"GET {target.path('/models')}: {listed.outcome()}; the server hangs")
    if listed.status in (401, 403):
        raise Unusable(f"the server wants another key: {listed.outcome()}")
    if listed.broken:
        raise Unusable(
            f"GET {target.path('/models')}: {listed.broken}; is the base URL that of an OpenAI API,"
            " with /v1?"
        )
    try:
        names = [str(model["id"]) for model in json.loads(listed.body)["data"]]
    except (ValueError, KeyError, TypeError):
        return  # not every gateway lists its models
    if names and target.model not in names:
        shown = ", ".join(sorted(names)[:10])
        raise Unusable(f"the server has no model {target.model!r}; it lists {shown}")


async def measure(wire: Wire, effort: Effort) -> Pace:
    """Measure the server alone and at its capacity. Raises ``Unusable``."""
    longest = await _longest(wire, effort)  # first: the one hung up may take a while to end
    lone = [await _lone(wire, effort) for _ in range(1 + effort.rounds)][1:]
    first_s = statistics.median(answer.first_s for answer in lone)
    gap_s = statistics.median(map(_gap_s, lone))
    longest_gap_s = max(answer.longest_gap_s for answer in lone)
    short = min(_MOST, max(_FEWEST, round(effort.wave_s / gap_s)))
    capacity = await _capacity(wire, effort, min(short, longest))
    return Pace(
        first_s=first_s,
        gap_s=gap_s,
        longest_gap_s=longest_gap_s,
        short=min(short, longest),
        longest=longest,
        **capacity._asdict(),
    )


async def _lone(wire: Wire, effort: Effort) -> Answer:
    answer = await wire.chat(_LONE_TOKENS, effort.patience_s)
    if not answer.is_whole or not answer.texts:
        raise Unusable(f"a streamed chat of {_LONE_TOKENS} tokens: {answer.outcome()}")
    return answer


def _gap_s(answer: Answer) -> float:
    """Time per token; of a stream that came all at once, with the wait before it."""
    after_first_s = answer.last_s - answer.first_s
    is_gradual = answer.tokens > 1 and after_first_s > 0.2 * answer.last_s
    if is_gradual:
        return max(1e-5, after_first_s / (answer.tokens - 1))
    return max(1e-5, answer.last_s / max(1, answer.tokens))


async def _longest(wire: Wire, effort: Effort) -> int:
    """Tokens of the longest answer that is not refused."""
    tokens = effort.longest
    while tokens > _LONE_TOKENS:
        running = wire.begin(tokens, effort.patience_s)
        try:
            await running.answer.started.wait()
            if not running.answer.is_refused:
                break
        finally:
            await running.hang_up()
        tokens //= 2
    return tokens


class _Capacity(NamedTuple):
    streams: int
    tokens_per_s: float
    answer_s: float
    busy_gap_s: float


async def _capacity(wire: Wire, effort: Effort, short: int) -> _Capacity:
    """Double the streams for as long as that makes more tokens per second."""
    best: _Capacity | None = None
    count, in_vain = 1, 0
    while count <= effort.most_streams and in_vain < _VAIN:
        wire.budget.need(count)
        began = wire.clock()
        answers = await together(wire.begin(short, effort.patience_s) for _ in range(count))
        rate = sum(answer.tokens for answer in answers) / (wire.clock() - began)
        if not all(answer.is_whole for answer in answers):
            if best is not None:
                break
            raise Unusable(f"a streamed chat of {short} tokens: {answers[0].outcome()}")
        in_vain += 1
        if best is None or rate >= _WORTH * best.tokens_per_s:
            in_vain = 0
            best = _Capacity(
                streams=count,
                tokens_per_s=rate,
                answer_s=statistics.median(answer.end_s for answer in answers),
                busy_gap_s=statistics.median(answer.longest_gap_s for answer in answers),
            )
        count *= 2
    assert best is not None, "one stream at least was measured"
    return best
