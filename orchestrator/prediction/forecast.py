"""The forecast: simulates an instance's schedule and predicts the times of every request.

Pure: it reads no clock and no instance. Its input is the requests in the order in which they get
rows, the step times and the number of rows. It draws ``DRAWS`` scenarios. A scenario gives every
request one of its equally likely lengths, the machine one of its likely speeds, and a likely number
of later arrivals. A request keeps its place in the scenarios (common random numbers): two forecasts
differ by their input and not by luck.

A row makes one token per step, so the first pass counts time in steps. A row ends after its own
steps, whatever their duration, and the next request in order gets it: list scheduling over a heap.
The second pass converts steps to milliseconds::

    step(n) = base + row · n + context · tokens of their contexts      as long as n rows run
    + prompt_ms                     when a request starts: its prompt delays all rows

Instances that serve the same model are simulated as one: their rows are summed, and a prompt delays
only its own instance.
"""

from collections.abc import Sequence
from heapq import heapify, heapreplace
from random import Random
from statistics import NormalDist
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

DRAWS: Final = 16
"""Number of scenarios, and of an answer's lengths (``answer_length``): each length occurs once."""
_SHUFFLES: Final = 251
"""Orders in which requests take their lengths; prime, so that evenly spaced keys share none."""
_NORMAL: Final = np.array([NormalDist().inv_cdf((at + 0.5) / DRAWS) for at in range(DRAWS)])
"""Medians of equally likely parts of a normal distribution."""

Floats = NDArray[np.float64]


class Asked(NamedTuple):
    """One request as the forecast sees it. Times are ms from now, infinite if none is stated."""

    key: int
    """A number that identifies the request: its place in the scenarios follows from it."""
    left: tuple[float, ...]
    """Equally likely numbers of remaining tokens, in rising order."""
    prompt_ms: float
    """Engine time that its prompt still takes; 0 after the first token."""
    prompt_steps: int
    """Steps for the prompt, at least one for a request without a token."""
    stop_ms: float
    """When it gives up its row, finished or not: at its deadline."""
    whole_ms: float
    """When its last token is due; infinite if an answer may be cut at its deadline."""
    first_ms: float
    """When its next token is due: the first token, or the next by the stated gap."""
    gap_ms: float
    """Maximum ms between a later token and the one before it."""
    context_tokens: int
    """Number of tokens of its prompt and of its answer so far."""


class Machine(NamedTuple):
    """The capacity of a model: identical ``instances`` with ``rows`` in total."""

    base_ms: float
    row_ms: float
    rows: int
    instances: int
    spread: float
    """Standard deviation of the logarithm of its speed."""
    bends: tuple[float, ...]
    """See ``StepModel``; indexed by the rows of one instance."""
    usual: int
    """Mean number of requests, running or waiting: arrivals replace those that end, up to it."""
    beside: int
    """How many more rows run if those leave rows free."""
    context_token_ms: float
    """Ms that a token of a row's context adds to a step."""

    def steps_ms(self, running: Floats, contexts: Floats) -> Floats:
        """Ms of a step, given the running rows and their context tokens over all instances
        together."""
        each = np.maximum(running / self.instances, 1.0)
        contexts_ms = self.context_token_ms * contexts / self.instances
        if self.bends:
            each = np.interp(each, np.arange(len(self.bends)), self.bends)
        times: Floats = self.base_ms + self.row_ms * each + contexts_ms
        return times


class Table(NamedTuple):
    """Requests as arrays of shape (requests,); remaining ``tokens``: (scenarios, requests)."""

    tokens: Floats
    prompt_ms: Floats
    extra_steps: Floats
    """Steps of the prompt after the first."""
    stop_ms: Floats
    whole_ms: Floats
    first_ms: Floats
    gap_ms: Floats
    context_tokens: Floats

    @classmethod
    def of(cls, asked: Sequence[Asked], draws: int = DRAWS) -> "Table":
        """``draws``: number of scenarios; fewer make a simulation cheaper and coarser."""
        columns = [(a.prompt_ms, max(0, a.prompt_steps - 1), *a[4:]) for a in asked]
        return cls(lengths(asked)[:draws], *np.array(columns, dtype=np.float64).reshape(-1, 7).T)


class Played(NamedTuple):
    """Times in ms from now and remaining tokens, each of shape (scenarios, requests)."""

    tokens: Floats
    start_ms: Floats
    first_ms: Floats
    end_ms: Floats
    """When the last token comes if nothing stops the request earlier."""
    free_ms: Floats
    """When a row becomes free for one more request behind all of these, by scenario."""
    step_ms: Floats
    """Ms of a step while all rows run, by scenario."""

    def behind(self, asked: Asked) -> "Played":
        """The result of one more request behind all of these, if they fill the rows. It delays none
        of them."""
        tokens, start = lengths([asked]), self.free_ms[:, None]
        steps = max(0, asked.prompt_steps - 1) + np.concatenate([np.ones_like(tokens), tokens], 1)
        takes = asked.prompt_ms + steps * self.step_ms[:, None]
        first, end = np.split(start + takes, 2, axis=1)
        return Played(tokens, start, first, end, self.free_ms, self.step_ms)

    def chances(self, asked: "Sequence[Asked] | Table") -> Floats:
        """Each request's chance that every part of it is in time."""
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
    """Remaining tokens, of shape (``DRAWS``, requests)."""
    if not asked:
        return np.empty((DRAWS, 0))
    lefts = np.array([one.left if len(one.left) == DRAWS else _spread(one.left) for one in asked])
    found = np.empty_like(lefts)
    np.put_along_axis(found, _PLACES[[one.key % _SHUFFLES for one in asked]], lefts, axis=1)
    return found.T


def at_share(values: Sequence[float], share: float) -> float:
    """The quantile of ``values`` (in rising order) below which ``share`` of them lies."""
    return values[min(len(values) - 1, int(share * len(values)))]


def _spread(left: Sequence[float]) -> tuple[float, ...]:
    """Spread the lengths of ``left`` over the scenarios."""
    return tuple(left[(i * len(left)) // DRAWS] for i in range(DRAWS))


def play(asked: Sequence[Asked] | Table, machine: Machine) -> Played:
    """Simulate ``asked``: the first ``machine.rows`` run now, each later one when a row is free."""
    table = asked if isinstance(asked, Table) else Table.of(asked)
    tokens, prompts, extra, stop = table[:4]
    (draws, count), rows, share = tokens.shape, machine.rows, 1 / machine.instances
    if not count:
        return Played(*[np.empty((draws, 0))] * 4, *[np.zeros(draws)] * 2)
    crowd = float(min(count, rows))
    context = table.context_tokens + tokens / 2  # halfway through its answer
    busy_ms = float(machine.steps_ms(np.array(crowd), crowd * context.mean()))
    # A request that reaches its deadline is stopped and frees its row.
    most = np.maximum(1.0, (stop - prompts) / busy_ms)
    steps = np.minimum(tokens, most) + extra
    # The last column is the start of one more request.
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
    # At equal steps ends come first: a prompt does not delay the request that left its row.
    at = np.concatenate([starts[:, :count] + steps, starts], axis=1)
    order = np.argsort(at, axis=1, kind="stable")
    running = np.cumsum(np.repeat((-1.0, 1.0, 0.0), (count, count, 1))[order], axis=1)
    read = np.concatenate([-context, context, np.zeros((draws, 1))], axis=1)
    contexts = np.cumsum(np.take_along_axis(read, order, axis=1), axis=1)
    # A stationary queue returns to its mean as its present requests leave. The number of arrivals
    # is about Poisson distributed, here by its normal approximation. It is computed once for each
    # possible number of remaining rows: there are fewer of those than events.
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
