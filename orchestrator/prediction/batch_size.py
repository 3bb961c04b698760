"""Computes how many rows an instance should run at once: its batch size.

More rows make more tokens a second, and each of them slower. With ``n`` rows a step takes
``base+row·n`` ms: a token takes its own text all of that, and the engine an ``n``-th of it. Which
number is best depends on the deadlines and the lengths that are asked for. The rule computes what
would come of each number ``r`` if requests like those of the last seconds kept coming::

    τ(n)    = (base + row · n) / (1 − φ(n))                a token's time; φ: the prompts' share
    e_i(n)  = prompt_i + length_i · (base + row · n) / n    engine time that a request costs
    ρ(n)    = Σ e_i(n) / T                                  load, where n rows run
    c_i(r)  = P(prompt_i + length_i · τ(n̄) ≤ deadline_i)    chance of being in time
    met(r)  = max Σ x_i c_i(r)   where   Σ x_i e_i(r) ≤ min(T, (1 − lost) Σ e_i(r)),  0 ≤ x_i ≤ 1

``T`` is the time in which those requests came. How many rows really run of the ``r`` that may,
``n̄`` on average, and which share of the work is ``lost`` because it waits for longer than it can,
follow from the birth-death process whose number rises as requests come and falls at ``1/ρ(n)``
times that rate: a processor that is shared (Kleinrock, Queueing Systems II, ch. 4) by no more than
``r``, with a queue that clients leave (Barrer, 1957). The maximum is that of a fractional knapsack:
the requests with the most chance for their cost go first (Dantzig, 1957). A request whose length is
not known is two items: its answer as far as it probably is worth running (the Gittins index's
stopping time; Gittins, 1979), and the rest.

The number with the greatest ``met``, less a little for engine time spent in vain, is taken, the
largest of about equal ones, so that light load and long deadlines have all slots. If at least half
of the tenants keep to their share of the engine, the rule considers only numbers with which these
lose next to nothing, whatever others ask for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchestrator.prediction.step_model import StepModel

MAX_REQUESTS = 96
"""Most requests that a decision rests on, the latest ones: it takes two milliseconds."""
MIN_SPAN_S, MAX_SPAN_S = 1.0, 10.0
"""Bounds in seconds on the window of requests, which is as long as their deadlines usually are."""
ABOUT_BEST, WORTH_LOWERING = 0.05, 0.15
"""Shares of the greatest ``met``, divided by the square root of the number of requests, since with
few requests a difference is chance. The largest number of rows within the first share of the best
is taken; one below the current number only if that lacks more than the second share."""
ABOUT_ALONE = 0.95
"""Share of what tenants that keep to their share would meet with the fastest rows that is left to
them, whatever others ask for."""
WASTE_WEIGHT = 0.4
"""Weight of engine time spent in vain: ten percent of it count like four percent of ``met``. In the
simulator, at twice the capacity, 0.1 met no more and wasted 25 % of the tokens instead of 19 %;
with a speed that wanders by a third it met 76 % instead of 77."""
BATCH_WEIGHT = 0.05
"""Weight of a batch request beside an interactive one."""
MIN_PROMPT_SHARE = 1 / 16
"""Share of an engine's time that long prompts get in any case, as workers have it."""
_MAX_PROMPT_SHARE = 0.9
_SURE, _LOST = 1.15, 0.85
"""Multiples of the usual time within which a length is in time, or is not. They are closer together
than for one job (``prediction.urgency``): over many jobs the speed is known well."""
_MIN_MS = 1e-6
_MIN_LOAD = 1e-6
_MAX_SLACK_MS = 60_000.0
_MAX_EXPONENT, _EVEN = 50.0, 1e-6
_PER_DOUBLING = 3
"""How many numbers of rows are tried within each doubling."""

Floats = NDArray[np.float64]


class RecentRequest(NamedTuple):
    """One request as it came. Times in ms, infinite if none is stated."""

    at: float
    """When the request came, in seconds of the clock."""
    left: tuple[float, ...]
    """Equally likely lengths of its answer in tokens, rising."""
    prompt_tokens: float
    whole_ms: float
    first_ms: float
    """Ms until the answer's first token is due."""
    weight: float
    tenant: str


@dataclass(frozen=True, slots=True)
class DemandArrays:
    """Requests as arrays, with one entry for each, and the time in which they came."""

    left: Floats
    prompt_tokens: Floats
    whole_ms: Floats
    first_ms: Floats
    weight: Floats
    tenant: NDArray[np.int64]
    span_ms: float

    def without_long_prompts(self, step_tokens: int) -> "DemandArrays | None":
        """The requests whose prompts fit into one step; None where all do, or none does."""
        short = self.prompt_tokens <= step_tokens
        if short.all() or not short.any():
            return None
        return DemandArrays(
            left=self.left[short],
            prompt_tokens=self.prompt_tokens[short],
            whole_ms=self.whole_ms[short],
            first_ms=self.first_ms[short],
            weight=self.weight[short],
            tenant=self.tenant[short],
            span_ms=self.span_ms,
        )


class Outlook(NamedTuple):
    """Predicted results of each number of rows."""

    rows: Sequence[int]
    step_ms: Floats
    met: Floats
    """Requests met, by weight; 0 where others' rows would cost a tenant its share."""
    prompt_share: Floats
    """Share of the engine's time that goes to prompts."""
    requests: int

    def met_at(self, count: int) -> float:
        return float(self.met[min(range(len(self.rows)), key=lambda i: abs(self.rows[i] - count))])

    def prompt_shares_at(self, rows: Sequence[int], current: int) -> Floats:
        """``prompt_share`` for other numbers of rows, drawn half-way to that of the ``current``
        number: a pessimistic share could make itself come true."""
        shares: Floats = np.interp([*rows, current], self.rows, self.prompt_share)
        halves: Floats = (shares[:-1] + shares[-1]) / 2
        return halves


class RecentDemand:
    """Requests of late: a window that is as long as deadlines usually are."""

    def __init__(self) -> None:
        self._asked: list[RecentRequest] = []

    def add(self, asked: RecentRequest) -> None:
        self._asked.append(asked)
        if len(self._asked) >= 2 * MAX_REQUESTS:
            del self._asked[:-MAX_REQUESTS]

    def demand(self, now: float) -> DemandArrays | None:
        """The demand as of ``now``, in seconds of the clock; None if nothing came lately."""
        latest = self._asked[-MAX_REQUESTS:]
        stated = sorted(one.whole_ms for one in latest if one.weight == 1.0) or [math.inf]
        span_s = min(max(stated[len(stated) // 2] / 1000, MIN_SPAN_S), MAX_SPAN_S)
        window = [one for one in latest if one.at > now - span_s]
        if not window:
            return None
        if len(window) == MAX_REQUESTS:  # the window reaches back no further
            span_s = max(now - window[0].at, 0.001)
        tenants = {name: number for number, name in enumerate({one.tenant for one in window})}
        return DemandArrays(
            left=np.array([one.left for one in window]),
            prompt_tokens=np.array([one.prompt_tokens for one in window]),
            whole_ms=np.array([one.whole_ms for one in window]),
            first_ms=np.array([one.first_ms for one in window]),
            weight=np.array([one.weight for one in window]),
            tenant=np.array([tenants[one.tenant] for one in window]),
            span_ms=1000 * span_s,
        )


@lru_cache
def row_counts(most: int) -> tuple[int, ...]:
    """Numbers of rows to try, up to ``most``."""
    found, at = list(range(1, min(8, most) + 1)), 8.0
    while (at := at * 2 ** (1 / _PER_DOUBLING)) < most - 0.5:
        found.append(round(at))
    return tuple(found if most <= 8 else [*found, most])


def outlook(
    demand: DemandArrays,
    pace: StepModel,
    rows: Sequence[int],
    *,
    share: float = 1.0,
    others: int = 0,
    standing: float = 0.0,
    prompt_share: Floats | float = 0.0,
) -> Outlook:
    """Predict the results of ``demand`` for each number of ``rows``, rising from 1.

    ``share`` of the requests come to this instance, where ``standing`` jobs of an earlier time want
    rows as well; ``others`` are rows there that are not ours, ``prompt_share`` is how much of its
    time goes to prompts, one for all or by ``rows``, as of an earlier outlook: the more rows, the
    less time the answers' own steps take. Arrays are by (rows, request, length).
    """
    own = np.array(rows, dtype=np.float64)
    decoding = 1 - np.minimum(prompt_share, _MAX_PROMPT_SHARE)

    def step_ms(count: Floats) -> Floats:
        together = count + others
        if pace.bends:
            together = np.interp(together, np.arange(len(pace.bends)), pace.bends)
        return pace.base_ms + pace.row_ms * together

    token_cost_ms = (step_ms(own) / (own + others))[:, None]
    room_ms = demand.span_ms * own / (own + others)
    alone = _times(demand, pace, step_ms(own) / decoding)
    usual, lost = _crowd(demand, alone, own, token_cost_ms, room_ms, share)
    times = _times(demand, pace, step_ms(np.minimum(own, usual + standing)) / decoding)
    chance = _in_time((times.room_ms / times.token_ms)[:, :, None] / demand.left)
    chance *= _in_time(demand.first_ms / times.first_ms)[:, :, None]
    cost_ms = _until(np.minimum(demand.left, times.most_tokens[:, :, None]))
    cost_ms *= share * token_cost_ms[:, :, None]
    cost_ms += (share * times.prompt_ms)[:, None]
    gained = np.cumsum(chance, axis=2) / chance.shape[2]
    whole_chance, whole_ms = gained[:, :, -1], cost_ms[:, :, -1]
    at = np.argmax(gained / cost_ms, axis=2)[:, :, None]
    part_chance = np.take_along_axis(gained, at, 2)[:, :, 0]
    part_ms = np.take_along_axis(cost_ms, at, 2)[:, :, 0]
    rest_ms = whole_ms - part_ms

    excess = _excess(demand, whole_ms[len(rows) // 2])
    weight = demand.weight / np.maximum(excess, 1.0)[demand.tenant]
    gain = np.concatenate([part_chance * weight, (whole_chance - part_chance) * weight], axis=1)
    cost = np.concatenate([part_ms, rest_ms], axis=1)
    prompts = np.broadcast_to(share * times.prompt_ms, part_ms.shape)
    prompts = np.concatenate([prompts, np.zeros_like(part_ms)], axis=1)
    order = np.argsort(-gain / np.maximum(cost, _MIN_MS), axis=1)
    gain, cost, prompts = (np.take_along_axis(a, order, 1) for a in (gain, cost, prompts))
    spent = np.cumsum(cost, axis=1)
    served_ms = np.minimum(room_ms, (1 - lost) * spent[:, -1])[:, None]
    served = np.clip(1 - (spent - served_ms) / np.maximum(cost, _MIN_MS), 0.0, 1.0)
    met = (gain * served).sum(axis=1)
    # Tokens of requests that will be late are of use to nobody.
    vain = np.concatenate([part_ms * (1 - part_chance), rest_ms * (1 - whole_chance)], axis=1)
    vain_ms = (np.take_along_axis(vain, order, 1) * served).sum(axis=1)
    met *= 1 - WASTE_WEIGHT * vain_ms / room_ms
    met[~_as_if_alone(demand, whole_chance, excess)] = 0.0
    shares = (prompts * served).sum(axis=1) / demand.span_ms
    return Outlook(rows, step_ms(own), met, shares, len(demand.left))


def paced_outlook(
    demand: DemandArrays,
    pace: StepModel,
    rows: Sequence[int],
    *,
    share: float = 1.0,
    others: int = 0,
    standing: float = 0.0,
    prompt_share: Floats | float = 0.0,
) -> Outlook:
    """The better of two outlooks: all prompts at full speed, or long ones in what is left over.

    Workers decide between these in each step (``worker.scheduler.stalls``). Arguments as of
    ``outlook``.
    """
    foresee = partial(outlook, pace=pace, rows=rows, share=share, others=others, standing=standing)
    found = foresee(demand, prompt_share=prompt_share)
    short = demand.without_long_prompts(pace.step_tokens)
    if short is None:
        return found
    prompts_ms = share * float(short.prompt_tokens.sum()) * pace.prompt_token_ms
    least_share = prompts_ms / short.span_ms + MIN_PROMPT_SHARE
    waiting = foresee(short, prompt_share=np.minimum(prompt_share, least_share))
    return waiting if waiting.met.max() > found.met.max() else found


def best_rows(found: Outlook, current: int) -> int:
    rows, met = found.rows, found.met
    best = float(met.max())
    if best <= 0:
        return rows[-1]
    unsure = 1 / math.sqrt(found.requests)
    chosen = rows[int(np.flatnonzero(met >= (1 - ABOUT_BEST * unsure) * best)[-1])]
    if chosen >= current:
        return chosen
    return chosen if found.met_at(current) < (1 - WORTH_LOWERING * unsure) * best else current


def _in_time(ratio: Floats) -> Floats:
    """The chance of being in time with ``ratio`` times the usual time left."""
    return np.clip((ratio - _LOST) / (_SURE - _LOST), 0.0, 1.0)


def _until(tokens: Floats) -> Floats:
    """Tokens that an answer takes on average if it is stopped after each of its likely lengths."""
    count = tokens.shape[2]
    return (np.cumsum(tokens, axis=2) + tokens * np.arange(count - 1, -1, -1)) / count


class _Times(NamedTuple):
    """Times of requests if a token takes a text ``token_ms``; all by (rows, request), in ms."""

    token_ms: Floats
    prompt_ms: Floats
    """The engine's time for the prompt, by request."""
    first_ms: Floats
    room_ms: Floats
    most_tokens: Floats
    """Most tokens before the answer is stopped at its deadline."""


def _times(demand: DemandArrays, pace: StepModel, token_ms: Floats) -> _Times:
    token_ms = token_ms[:, None]
    prompt_ms = demand.prompt_tokens * pace.prompt_token_ms
    first_ms = prompt_ms + np.ceil(demand.prompt_tokens / pace.step_tokens) * token_ms
    room_ms = demand.whole_ms - first_ms
    return _Times(token_ms, prompt_ms, first_ms, room_ms, np.maximum(room_ms / token_ms, 1.0))


def _crowd(
    demand: DemandArrays,
    times: _Times,
    own: Floats,
    token_cost_ms: Floats,
    room_ms: Floats,
    share: float,
) -> tuple[Floats, Floats]:
    """How many rows run beside each other if so many may, as a row finds it on average, and which
    share of the work is lost because it waits longer than it can.

    Where ``n`` run, their number rises at the rate at which requests come and falls at the rate at
    which ``n`` rows serve them; a request that finds all rows taken waits, and leaves once it is
    late. The two rates' ratio is the load ``ρ(n)``, the work that comes over the time for it.
    """
    tokens = np.minimum(demand.left, times.most_tokens[:, :, None]).mean(axis=2)
    cost_ms = share * (times.prompt_ms + tokens * token_cost_ms)
    slack_ms = times.room_ms - tokens * times.token_ms
    slack_ms = np.minimum(slack_ms, demand.first_ms - times.first_ms).clip(0.0, _MAX_SLACK_MS)
    work_ms = cost_ms.sum(axis=1)
    load = np.maximum(work_ms / room_ms, _MIN_LOAD)
    # As if all were alike: a few large requests among many small ones queue as the large ones do.
    alike = work_ms**2 / np.maximum((cost_ms**2).sum(axis=1), _MIN_MS)
    slack_ms = (cost_ms * slack_ms).sum(axis=1) / np.maximum(work_ms, _MIN_MS)
    # The number of requests that leave while one can wait.
    served = share * alike * slack_ms / demand.span_ms / load
    counts = np.arange(own[-1] + 1)
    level = np.cumsum(np.log(np.interp(counts[1:], own, load)))
    weight = np.exp(np.append(0.0, level) - level.max(initial=0.0))
    below, rows = np.cumsum(weight), own.astype(np.int64)
    seen, squares = np.cumsum(weight * counts), np.cumsum(weight * counts**2)
    # The wait that a request finds: exponential up to the slack, and as it decays from there.
    exponent = np.maximum(served * (1 - load), -_MAX_EXPONENT)
    last = weight[rows - 1] * load
    beyond = last * np.exp(-exponent)
    is_even = np.abs(exponent) < _EVEN
    waiting = last * np.where(
        is_even, served, -np.expm1(-exponent) / np.where(is_even, 1, 1 - load)
    )
    full_rows = waiting + beyond
    usual = (squares[rows - 1] + own**2 * full_rows) / (seen[rows - 1] + own * full_rows)
    return usual, beyond / (below[rows - 1] + full_rows)


def _excess(demand: DemandArrays, cost_ms: Floats) -> Floats:
    """How many times its equal share of the engine's time each tenant asks for."""
    tenants = int(demand.tenant.max()) + 1
    return np.bincount(demand.tenant, cost_ms, tenants) / demand.span_ms * tenants


def _as_if_alone(demand: DemandArrays, chances: Floats, excess: Floats) -> NDArray[np.bool_]:
    """Whether tenants that keep to their share lose next to nothing by others' rows, by number of
    rows.

    True for all numbers if most tenants ask for more than their share: who does not is chance then.
    """
    keeps = excess <= 1.0
    if keeps.all() or 2 * keeps.sum() < len(keeps):
        return np.ones(len(chances), dtype=np.bool_)
    met: Floats = (chances * (demand.weight * keeps[demand.tenant])).sum(axis=1)
    return np.greater_equal(met, ABOUT_ALONE * met.max())
