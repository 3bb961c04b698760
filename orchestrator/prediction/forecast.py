"""The forecast: plays an instance's schedule forward, and says what becomes of every request.

Pure: no clock, no instance. Given the requests in the order in which they get rows, what a step
takes, and how many rows there are, it draws ``DRAWS`` scenarios. In each of them every request has
one of its equally likely lengths, the machine has one of its likely speeds, and a likely number of
others comes later. A request keeps its place among them (common random numbers): two forecasts
differ by what was asked, not by luck.

One row makes one token a step, so the rows' lengths are counted in steps. In that time a row ends
when its own steps are over, however long these take, and the request next in order gets it: list
scheduling over a heap. The second pass lays steps out in milliseconds::

    step(n) = base + row · n + context · tokens of their contexts      as long as n rows run
    + prompt_ms                     where a request starts: its prompt holds everybody up

Several instances that serve the same model are played as one: rows are added up, and a prompt
delays its own instance alone.
"""

from collections.abc import Sequence
from heapq import heapify, heapreplace
from random import Random
from statistics import NormalDist
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

DRAWS: Final = 16
"""Scenarios, and lengths of an answer (``answer_length``), so that each length comes once."""
_SHUFFLES: Final = 251
"""Orders in which requests take their lengths; prime, so that keys in steps share none."""
_NORMAL: Final = np.array([NormalDist().inv_cdf((at + 0.5) / DRAWS) for at in range(DRAWS)])
"""Medians of equally likely parts of a normal distribution."""

Floats = NDArray[np.float64]


class Asked(NamedTuple):
    """One request as the forecast sees it. Times are ms from now, infinite where none is stated."""

    key: int
    """Any number that stays the request's own: its place in the scenarios follows from it."""
    left: tuple[float, ...]
    """Equally likely numbers of tokens that it still makes, in rising order."""
    prompt_ms: float
    """Time of an engine that its prompt still takes; 0 once it has a token."""
    prompt_steps: int
    """Steps that the prompt is computed in, at least one for a request without a token."""
    stop_ms: float
    """When it gives up its row whatever it has: at its deadline."""
    whole_ms: float
    """When its last token is due; infinite where an answer that is cut there is as good."""
    first_ms: float
    """When its next token is due, the first one or by the schedule of a stated gap."""
    gap_ms: float
    """Ms by which each later token is due after the one before."""
    context_tokens: int
    """Tokens of its prompt and of its answer so far."""


class Machine(NamedTuple):
    """What serves a model: ``instances`` that are alike, with ``rows`` in all."""

    base_ms: float
    row_ms: float
    rows: int
    instances: int
    spread: float
    """Standard deviation of the logarithm of its speed."""
    bends: tuple[float, ...]
    """See ``StepModel``; by the rows of one instance."""
    usual: int
    """Mean number of requests there, in all: about so many come as those of now end."""
    beside: int
    """How many more run where those leave rows free."""
    context_token_ms: float
    """Time that a token of a row's context adds to a step."""

    def steps_ms(self, running: Floats, contexts: Floats) -> Floats:
        """What a step takes where so many rows, with so many tokens of context in all, run on all
        instances together."""
        each = np.maximum(running / self.instances, 1.0)
        contexts_ms = self.context_token_ms * contexts / self.instances
        if self.bends:
            each = np.interp(each, np.arange(len(self.bends)), self.bends)
        times: Floats = self.base_ms + self.row_ms * each + contexts_ms
        return times


class Table(NamedTuple):
    """Requests as arrays, with one entry for each; ``tokens`` to come by scenario and request."""

    tokens: Floats
    prompt_ms: Floats
    extra_steps: Floats
    """Steps of the prompt but the first."""
    stop_ms: Floats
    whole_ms: Floats
    first_ms: Floats
    gap_ms: Floats
    context_tokens: Floats

    @classmethod
    def of(cls, asked: Sequence[Asked], draws: int = DRAWS) -> "Table":
        """``draws`` scenarios: with fewer a play is cheaper and coarser."""
        columns = [(a.prompt_ms, max(0, a.prompt_steps - 1), *a[4:]) for a in asked]
        return cls(lengths(asked)[:draws], *np.array(columns, dtype=np.float64).reshape(-1, 7).T)


class Played(NamedTuple):
    """Times in ms from now and tokens to come, each by scenario and request."""

    tokens: Floats
    start_ms: Floats
    first_ms: Floats
    end_ms: Floats
    """When the last token comes, if nothing stops the request before."""
    free_ms: Floats
    """When a row is free for one more request behind all of these, by scenario."""
    step_ms: Floats
    """What a step takes while all rows run, by scenario."""

    def behind(self, asked: Asked) -> "Played":
        """One more request behind all of these, where they fill the rows: it delays none of
        them."""
        tokens, start = lengths([asked]), self.free_ms[:, None]
        steps = max(0, asked.prompt_steps - 1) + np.concatenate([np.ones_like(tokens), tokens], 1)
        takes = asked.prompt_ms + steps * self.step_ms[:, None]
        first, end = np.split(start + takes, 2, axis=1)
        return Played(tokens, start, first, end, self.free_ms, self.step_ms)

    def chances(self, asked: "Sequence[Asked] | Table") -> Floats:
        """The chance of each request that every part of it is in time."""
        if not asked:
            return np.empty(0)
        due = asked if isinstance(asked, Table) else Table.of(asked)
        first, gap = due.first_ms, due.gap_ms
        kept = (self.end_ms <= due.whole_ms) & (self.first_ms <= first)
        if (paced := np.isfinite(gap)).any():
            begin = np.where(np.isfinite(first), first, self.first_ms)
            by_gaps = begin + (self.tokens - 1) * np.where(paced, gap, 0.0)
            kept &= ~paced | (self.end_ms <= by_gaps)
        shares: Floats = kept.mean(axis=0)
        return shares


def _shuffles() -> NDArray[np.int64]:
    rng = Random(0)
    return np.array([rng.sample(range(DRAWS), DRAWS) for _ in range(_SHUFFLES)])


_PLACES: Final = _shuffles()
_PACES: Final = _NORMAL[_PLACES[0]]
_CROWDS: Final = _NORMAL[_PLACES[1], None]


def lengths(asked: Sequence[Asked]) -> Floats:
    """Tokens to come, by scenario and request."""
    if not asked:
        return np.empty((DRAWS, 0))
    lefts = np.array([one.left if len(one.left) == DRAWS else _spread(one.left) for one in asked])
    found = np.empty_like(lefts)
    np.put_along_axis(found, _PLACES[[one.key % _SHUFFLES for one in asked]], lefts, axis=1)
    return found.T


def at_share(values: Sequence[float], share: float) -> float:
    """The one of ``values``, in rising order, below which so large a share of them lies."""
    return values[min(len(values) - 1, int(share * len(values)))]


def _spread(left: Sequence[float]) -> tuple[float, ...]:
    """Spread the lengths of ``left`` over the scenarios."""
    return tuple(left[(i * len(left)) // DRAWS] for i in range(DRAWS))


def play(asked: Sequence[Asked] | Table, machine: Machine) -> Played:
    """Play ``asked`` forward: the first ``machine.rows`` run now, each later one once a row is
    free."""
    table = asked if isinstance(asked, Table) else Table.of(asked)
    tokens, prompts, extra, stop = table[:4]
    (draws, count), rows, share = tokens.shape, machine.rows, 1 / machine.instances
    if not count:
        return Played(*[np.empty((draws, 0))] * 4, *[np.zeros(draws)] * 2)
    crowd = float(min(count, rows))
    context = table.context_tokens + tokens / 2  # halfway through its answer
    busy_ms = float(machine.steps_ms(np.array(crowd), crowd * context.mean()))
    # What does not end by its deadline is stopped there, and leaves its row to others.
    most = np.maximum(1.0, (stop - prompts) / busy_ms)
    steps = np.minimum(tokens, most) + extra
    # The last start is that of one more request.
    starts = np.zeros((draws, count + 1))
    if count >= rows:
        for scenario, own in enumerate(steps.tolist()):
            free, begun = own[:rows], []
            heapify(free)
            for length in own[rows:]:
                start = free[0]
                begun.append(start)
                heapreplace(free, start + length)
            starts[scenario, rows:] = [*begun, free[0]]
    # Of events at one step ends come first: a prompt that takes a row delays nobody who left it.
    at = np.concatenate([starts[:, :count] + steps, starts], axis=1)
    order = np.argsort(at, axis=1, kind="stable")
    running = np.cumsum(np.repeat((-1.0, 1.0, 0.0), (count, count, 1))[order], axis=1)
    read = np.concatenate([-context, context, np.zeros((draws, 1))], axis=1)
    contexts = np.cumsum(np.take_along_axis(read, order, axis=1), axis=1)
    # A stationary queue returns to its mean as what it holds now leaves. The number that has come
    # is close to a Poisson distribution, here by its normal approximation. Computed once for each
    # number of rows that can be left, which are fewer than events.
    left = np.arange(crowd + 1)
    others = min(machine.usual, rows) * (1 - left / crowd)
    others = np.clip(others + _CROWDS[:draws] * np.sqrt(others), 0.0, rows - left)
    others += np.minimum(machine.beside, rows - left - others)
    others = np.take_along_axis(others, running.astype(np.intp), axis=1)
    context_each = float(table.context_tokens[:rows].mean())
    step_ms = machine.steps_ms(running + others, contexts + others * context_each)
    wall = np.cumsum(np.concatenate([np.zeros(count), prompts * share, [0.0]])[order], axis=1)
    passed = np.diff(np.take_along_axis(at, order, axis=1), axis=1) * step_ms[:, :-1]
    wall[:, 1:] += np.cumsum(passed, axis=1)
    times, step_then = np.empty_like(wall), np.empty_like(wall)
    np.put_along_axis(times, order, wall, axis=1)
    np.put_along_axis(step_then, order, step_ms, axis=1)
    pace = np.exp(machine.spread * _PACES[:draws])[:, None]
    begun, own_ms = times[:, count:-1], prompts * (1 - share)
    first = begun + own_ms + step_then[:, count:-1] * (1 + extra)
    end = times[:, :count] + own_ms + (tokens - np.minimum(tokens, most)) * busy_ms
    return Played(
        tokens,
        (begun - prompts * share) * pace,
        first * pace,
        np.maximum(first, end) * pace,
        times[:, -1] * pace[:, 0],
        busy_ms * pace[:, 0],
    )
