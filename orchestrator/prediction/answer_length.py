"""How long answers will be: a distribution, by what it depends on.

Lengths fall into bins that grow with the length. For each bin a node keeps how many answers reached
it and how many ended in it, so that one cut by a deadline or a cancel counts for as far as it got
(the life table, or Kaplan and Meier's estimator in discrete time). The share that ended is the
bin's *hazard*; how long an answer of n tokens will still be follows from the hazards beyond n.

Nodes form a chain, each narrower than the one before::

    any answer ─▶ model ─▶ tenant ─▶ stated cap ─▶ stated deadline ─▶ session

and each is drawn towards the one before it with the weight of ``_PRIOR`` answers: a node with few
answers of its own says what its parent says.
"""

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

QUANTILES = 16
"""A distribution is given as so many equally likely lengths."""
_EDGES = sorted({*range(1, 17), *(round(16 * 2 ** (i / 4)) for i in range(1, 57))})
"""The last length of each bin: up to 256 Ki tokens, a quarter of an octave each."""
_LASTING = [1 - (i + 0.5) / QUANTILES for i in range(QUANTILES)]
_LOG_LASTING = [math.log(share) for share in _LASTING]
"""The shares of answers that are longer than each of the quantiles."""
_LEAST_LASTING = 1e-300
"""Of a bin's answers: keeps logarithms finite."""
_PRIOR = 6.0
_FIRST_MEAN = 128.0
"""Tokens of an answer of which nothing is known."""
_HALF_LIFE = 192
"""Answers after which one counts half."""
_DECAY_EVERY = 8
_RANK_SMOOTHING = 1 / 12
_SURPRISE = 0.22
"""Mean ranks of recent answers this far from the middle are no chance (over four sigma): what was
learnt is of other answers, and counts little from then on."""
_KEPT_OF_OLD = 0.05
_MOST_NODES = 4096
_MOST_CURVES = 1024
_MOST_KNOWN = 512


class LengthKey(NamedTuple):
    """What an answer's length depends on; no ``deadline_ms`` where none was stated."""

    model: str
    tenant: str = ""
    cap: int = 0
    deadline_ms: float | None = None
    session: str = ""

    def chain(self) -> list[tuple[object, ...]]:
        """Names of the nodes, the widest first."""
        links: list[tuple[object, ...]] = [(self.model,)]
        links.append((*links[-1], self.tenant))
        links.append((*links[-1], _octave(self.cap, 1)))
        if self.deadline_ms is not None:
            links.append((*links[-1], _octave(self.deadline_ms, 2)))
        if self.session:
            links.append((self.model, self.tenant, "session", self.session))
        return links


class LengthCurve:
    """One answer's distribution; frozen. ``hazards`` are by bin."""

    __slots__ = ("_known", "_log_ended")

    def __init__(self, hazards: Sequence[float]) -> None:
        logs = (-math.log(max(1 - hazard, _LEAST_LASTING)) for hazard in hazards)
        self._log_ended = list(accumulate(logs, initial=0.0))
        """−log of the share of answers that are longer than each edge, rising; the first is 0."""
        self._known: dict[tuple[int, int], tuple[float, ...]] = {}

    def left(self, made: int, cap: int) -> tuple[float, ...]:
        """Tokens still to come after ``made``, as equally likely quantiles in rising order.

        None is more than ``cap`` − ``made``. For a long answer ``made`` is rounded down a little.
        """
        if made > 16:
            made -= made % (made.bit_length() - 3)
        known = self._known.get((made, cap))
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[made, cap] = self._left(made, cap)
        return known

    def _left(self, made: int, cap: int) -> tuple[float, ...]:
        ended, last = self._log_ended, len(_EDGES)
        at = bisect_left(_EDGES, made + 1)
        if at == last or ended[at] == ended[last]:  # nothing ends before its cap
            return (max(1.0, float(cap - made)),) * QUANTILES
        first, begin = _EDGES[at - 1] if at else 0, float(made)
        # Of a bin that has been passed in part, the rest of its hazard is left.
        share_passed = (begin - first) / (_EDGES[at] - first)
        here = ended[at] + share_passed * (ended[at + 1] - ended[at])
        lengths: list[float] = []
        alive, after = 1.0, math.exp(here - ended[at + 1])
        for lasting, log_lasting in zip(_LASTING, _LOG_LASTING, strict=True):
            if after > lasting:
                at = bisect_left(ended, here - log_lasting, at + 2) - 1
                if at >= last:
                    break
                begin = float(_EDGES[at - 1])
                alive, after = math.exp(here - ended[at]), math.exp(here - ended[at + 1])
            length = begin + (alive - lasting) / (alive - after) * (_EDGES[at] - begin)
            if length >= cap:
                break
            lengths.append(max(1.0, length - made))
        most = max(1.0, float(cap - made))
        return (*lengths, *[most] * (QUANTILES - len(lengths)))

    def quantile(self, share: float, made: int, cap: int) -> float:
        """Tokens still to come that the answer does not exceed with that probability."""
        left = self.left(made, cap)
        return left[min(QUANTILES - 1, int(share * QUANTILES))]


class _Node:
    """Answers of one kind, by bin."""

    def __init__(self) -> None:
        self.ended = [0.0] * len(_EDGES)
        self.reached = [0.0] * len(_EDGES)
        self.answers = 0
        self._mean_rank = 0.5

    def add(self, tokens: int, *, finished: bool) -> None:
        self.answers += 1
        if self.answers % _DECAY_EVERY == 0:
            self._scale(0.5 ** (_DECAY_EVERY / _HALF_LIFE))
        last = min(bisect_left(_EDGES, tokens), len(_EDGES) - 1)
        self._watch(last, finished=finished)
        for at in range(last):
            self.reached[at] += 1
        if finished:
            self.reached[last] += 1
            self.ended[last] += 1

    def _watch(self, last: int, *, finished: bool) -> None:
        """Forget most of what was learnt when answers are not like it any more."""
        if not self.reached[0] > QUANTILES:
            return
        alive = 1.0
        for at in range(last):
            alive *= 1 - (self.ended[at] / self.reached[at] if self.reached[at] else 0.0)
        ends = self.ended[last] / self.reached[last] if self.reached[last] else 0.0
        below, above = 1 - alive, 1 - alive * (1 - ends)
        rank = (below + above) / 2 if finished else (1 + below) / 2
        self._mean_rank += _RANK_SMOOTHING * (rank - self._mean_rank)
        if abs(self._mean_rank - 0.5) > _SURPRISE:
            self._scale(_KEPT_OF_OLD)
            self._mean_rank = 0.5

    def _scale(self, factor: float) -> None:
        self.ended = [count * factor for count in self.ended]
        self.reached = [count * factor for count in self.reached]

    def hazards(self, prior: Sequence[float]) -> list[float]:
        return [
            (ended + _PRIOR * expected) / (reached + _PRIOR)
            for ended, reached, expected in zip(self.ended, self.reached, prior, strict=True)
        ]


def _first_hazards() -> list[float]:
    """Every next token as likely to be the last one."""
    before, hazards = 0, []
    for edge in _EDGES:
        hazards.append(1 - (1 - 1 / _FIRST_MEAN) ** (edge - before))
        before = edge
    return hazards


_FIRST_HAZARDS = _first_hazards()


class AnswerLengths:
    """Learns curves from answers. Bounded: the kinds least recently used are dropped."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[tuple[object, ...], _Node] = OrderedDict()
        self._curves: dict[tuple[tuple[object, ...], ...], tuple[int, LengthCurve]] = {}
        self._asked: dict[LengthKey, LengthCurve] = {}
        """Curves by key, as long as nobody has answered since: every plan asks."""

    def answered(self, key: LengthKey, tokens: int, *, finished: bool) -> None:
        """An answer came to its own end after ``tokens``, or was cut there and would have gone on.

        One that ended because it reached the stated cap was cut.
        """
        self._asked.clear()
        for link in key.chain():
            node = self._nodes.get(link)
            if node is None:
                node = self._nodes[link] = _Node()
            self._nodes.move_to_end(link)
            node.add(tokens, finished=finished)
        while len(self._nodes) > _MOST_NODES:
            self._nodes.popitem(last=False)

    def curve(self, key: LengthKey) -> LengthCurve:
        """What is known now of such an answer's length."""
        curve = self._asked.get(key)
        if curve is None:
            if len(self._asked) >= _MOST_NODES:
                self._asked.clear()
            curve = self._asked[key] = self._curve(key)
        return curve

    def _curve(self, key: LengthKey) -> LengthCurve:
        links = tuple(link for link in key.chain() if link in self._nodes)
        nodes = [self._nodes[link] for link in links]
        version = sum(node.answers for node in nodes)
        known = self._curves.get(links)
        # Where much is known one answer more changes little, and every waiting task asks.
        if known is not None and 0 <= version - known[0] <= version // 64:
            return known[1]
        hazards: Sequence[float] = _FIRST_HAZARDS
        for node in nodes:
            hazards = node.hazards(hazards)
        if len(self._curves) >= _MOST_CURVES:
            self._curves.clear()
        curve = LengthCurve(hazards)
        self._curves[links] = (version, curve)
        return curve


STATED = LengthCurve([0.0] * len(_EDGES))
"""Of an answer that takes all of its cap."""


def _octave(value: float, parts: int) -> int:
    return round(parts * math.log2(max(1.0, value)))
