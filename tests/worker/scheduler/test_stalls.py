"""A prompt pays for the stall that it causes, on virtual time."""

import math
from collections.abc import Sequence

import pytest

from protocol import Sampling
from tests.support.engine import config
from worker.core import Job
from worker.scheduler.block_pool import BlockPool
from worker.scheduler.order import expected_left
from worker.scheduler.request import Request, make_request
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.step_time import StepTime

PLAIN_S, TOKEN_S = 0.002, 0.0002
FULL = 249
"""Prompt tokens that take just less than ``max_stall_s``."""
LONG = 1500
"""Tokens of a prompt that takes 0.3 s."""


def request(
    prompt: int,
    left_s: float = math.inf,
    *,
    answer: int = 60,
    expected: int = 0,
    gap_s: float = math.inf,
    at: float = 0.0,
) -> Request:
    """One that makes ``answer`` tokens of the 200 that it may, and is expected to make as many."""
    job = Job(
        [9] * prompt,
        Sampling(max_tokens=200),
        at + left_s,
        token_gap_s=gap_s,
        expected_tokens=expected or answer,
    )
    return make_request(job, submitted_at=at, own_seed=answer)


class Machine:
    """Steps take ``PLAIN_S`` and ``TOKEN_S`` for each prompt token, exactly; those with prompt
    tokens take ``chunk_s`` more."""

    def __init__(
        self, *, max_step_tokens: int = 512, tile_tokens: int = 1, chunk_s: float = 0.0
    ) -> None:
        self.chunk_s = chunk_s
        limits = config(
            context_tokens=4096,
            block_tokens=16,
            max_step_tokens=max_step_tokens,
            max_running=min(64, max_step_tokens),
            max_waiting=64,
            min_start_budget_s=0.0,
            prefix_cache=False,
            tile_tokens=tile_tokens,
        )
        self.scheduler = Scheduler(limits, BlockPool(2048))
        self.now = 0.0
        self.ended: dict[Request, float] = {}
        self._learn(PLAIN_S, 0)
        for number in range(200):
            tokens = 100 if not chunk_s else 50 + number
            self._learn(PLAIN_S + chunk_s + TOKEN_S * tokens, tokens)

    def add(self, *requests: Request) -> None:
        for one in requests:
            assert self.scheduler.enqueue(one, self.now) is None

    def step(self, *, heeds_time: bool = True) -> int:
        """How many prompt tokens it carried beside decodes."""
        plan = self.scheduler.schedule(self.now if heeds_time else -math.inf).plan
        assert plan is not None
        tokens = plan.tokens - plan.decodes
        took_s = PLAIN_S + TOKEN_S * tokens + (self.chunk_s if tokens else 0.0)
        self.now += took_s
        self._learn(took_s, tokens)
        for row in plan.rows:
            self.scheduler.advance(row, [7] if row.samples else [])
            if row.request.generated == row.request.seed:
                self.scheduler.release(row.request)
                self.ended[row.request] = self.now
        self.scheduler.check_integrity()
        return tokens

    def run(self, *, heeds_time: bool = True) -> None:
        while self.scheduler.has_work:
            self.step(heeds_time=heeds_time)

    def decoding(self, *rows: Request) -> None:
        """Have ``rows`` decode."""
        self.add(*rows)
        while any(not one.generated for one in rows):
            self.step()

    def met(self, requests: Sequence[Request]) -> int:
        return sum(self.ended[one] <= one.deadline for one in requests)

    def _learn(self, took_s: float, tokens: int) -> None:
        self.scheduler.step_time.decoded(took_s, 1, rows=1, prompt_tokens=tokens)
        self.scheduler.step_time.prefilled(took_s, tokens)


@pytest.mark.parametrize(("heeds_time", "met"), [(False, 0), (True, 4)])
def test_a_long_prompt_goes_around_tight_rows(heeds_time: bool, met: int) -> None:
    """All of it at once makes them late; its own deadline allows that they go first."""
    machine = Machine()
    rows, prompt = [request(1, 0.25) for _ in range(4)], request(LONG, 2.0, answer=10)
    machine.decoding(*rows)
    machine.add(prompt)
    machine.run(heeds_time=heeds_time)
    assert machine.met(rows) == met
    assert machine.met([prompt]) == 1


def test_rows_take_no_more_than_they_need() -> None:
    """What they can spare is the prompt's: they end in time, and not much before it."""
    machine = Machine()
    row, prompt = request(1, 0.3), request(4000, 60.0)
    machine.decoding(row)
    machine.add(prompt)
    while row not in machine.ended:
        machine.step()
    assert 0.2 < machine.ended[row] < 0.3
    assert prompt.computed > 0.3 * (machine.now - PLAIN_S) / TOKEN_S


def test_where_every_chunk_costs_rows_get_few_large_ones() -> None:
    """As on a GPU, where a step with a prompt takes several plain ones, however short it is."""
    machine = Machine(chunk_s=0.01)
    row, prompt = request(1, 1.0), request(4000, 60.0)
    machine.decoding(row)
    machine.add(prompt)
    chunks = []
    while row not in machine.ended:
        chunks.append(machine.step())
    assert 0.5 < machine.ended[row] < 1.0
    beside = [tokens for tokens in chunks if tokens]
    assert len(beside) >= 3 and min(beside[:-1]) * TOKEN_S >= 0.035  # or all that a step may carry


@pytest.mark.parametrize(
    "rows",
    [
        [request(1, 10.0), request(1, 5.0)],
        [request(1), request(1)],
        [request(1, 0.05), request(1, 10.0)],  # the first one is late in any case
        [request(1, 0.6, answer=3)],
    ],
    ids=["slack", "no deadline", "lost", "soon done"],
)
def test_rows_that_lose_nothing_do_not_slow_prompts_down(rows: list[Request]) -> None:
    machine = Machine()
    machine.decoding(*rows)
    machine.add(request(LONG, 60.0))
    assert machine.step() == FULL


@pytest.mark.parametrize(("rows", "prompts", "winner"), [(4, 1, "rows"), (1, 4, "prompts")])
def test_where_both_cannot_be_had_more_chances_win(rows: int, prompts: int, winner: str) -> None:
    machine = Machine()
    tight = [request(1, 0.165) for _ in range(rows)]
    machine.decoding(*tight)
    at = machine.now
    pressed = [request(240, 0.3, answer=10, at=at) for _ in range(prompts)]
    machine.add(*pressed)
    if winner == "rows":
        machine.add(request(700, 0.17, answer=2, at=at))
    machine.run()
    if winner == "rows":
        assert machine.met(tight) == rows
    else:
        assert machine.met(pressed) == prompts


def test_a_prompt_of_seconds_is_weighed_against_all_rows_that_it_delays() -> None:
    """Rows like this one would come and go while two prompts are computed: it goes first, though
    two prompts are more than one row, and all three end in time."""
    machine = Machine()
    row = request(1, 0.15)
    machine.decoding(row)
    prompts = [request(LONG, 1.3, answer=2, at=machine.now) for _ in range(2)]
    machine.add(*prompts)
    machine.run()
    assert machine.met([row]) == 1
    assert machine.met(prompts) == 2


def test_short_prompts_go_at_once() -> None:
    """Also past a long one; the rows wait for less than it would have to."""
    machine = Machine()
    machine.decoding(*(request(1, 0.18) for _ in range(4)))
    machine.add(request(LONG, 5.0))
    paced = [machine.step() for _ in range(10)]
    assert max(paced) <= 16 and sum(paced) > 0
    short = request(32, 0.3, at=machine.now)
    machine.add(short)
    assert machine.step() >= 32
    assert short.generated == 1


@pytest.mark.parametrize(
    ("max_step_tokens", "tile_tokens", "gap_s"),
    [(8, 1, math.inf), (32, 64, math.inf), (512, 64, 0.004)],
    ids=["a step of less than a block", "a step of less than a tile", "a gap of less than a tile"],
)
def test_no_prompt_starves_where_steps_are_small(
    max_step_tokens: int, tile_tokens: int, gap_s: float
) -> None:
    machine = Machine(max_step_tokens=max_step_tokens, tile_tokens=tile_tokens)
    machine.decoding(*(request(1, 0.17, gap_s=gap_s) for _ in range(4)))
    machine.add(request(LONG, 60.0))
    assert sum(machine.step() for _ in range(50)) > 0


@pytest.mark.parametrize("left_s", [600.0, math.inf])
def test_no_prompt_starves(left_s: float) -> None:
    """However many tight rows come, one after the other."""
    machine = Machine()
    prompt = request(400, left_s)
    machine.decoding(*(request(1, 0.17) for _ in range(4)))
    machine.add(prompt)
    steps = 0
    while not prompt.generated:
        machine.step()
        steps += 1
        missing = 5 - len(machine.scheduler.running) - len(machine.scheduler.waiting)
        machine.add(*(request(1, 0.17, at=machine.now) for _ in range(missing)))
    # A sixteenth of the time of plain steps, and what the rows' own prompts need.
    assert 1 < steps <= 1.5 * 16 * 400 * TOKEN_S / PLAIN_S


def test_a_prompt_that_has_no_deadline_gains_weight_while_it_waits() -> None:
    machine = Machine()
    prompt = request(LONG)
    machine.now = 299.9
    machine.decoding(request(1, 0.17, at=299.9))
    machine.add(prompt)
    assert machine.step() == FULL


@pytest.mark.parametrize(("gap_s", "most"), [(math.inf, FULL), (0.022, 100), (0.004, 16)])
def test_dl14_a_pace_keeps_to_the_gap(gap_s: float, most: int) -> None:
    """Whatever a prompt needs, and however long it has added up."""
    machine = Machine()
    machine.decoding(request(1, 0.3, gap_s=gap_s), request(1, 0.17))
    machine.add(request(LONG, 0.5))
    chunks = [machine.step() for _ in range(30)]
    assert 0 < max(chunks) <= most


@pytest.mark.parametrize(
    ("expected", "made", "least", "left"),
    [
        (40, 0, 0, 40),
        (40, 30, 0, 10),
        (40, 39, 0, 4.875),
        (40, 80, 0, 10),  # it has passed what was expected
        (0, 0, 0, 24),  # as answers here usually are
        (0, 80, 0, 24),
        (40, 30, 90, 90),
        (500, 30, 0, 170),  # no more than it may
    ],
)
def test_expected_tokens(expected: int, made: int, least: int, left: float) -> None:
    step_time = StepTime()
    step_time.answered(24)
    one = request(3, expected=expected or 1)
    one.job.expected_tokens = expected
    one.tokens += [7] * made
    one.limit_tokens, one.least_tokens = 203, least
    assert expected_left(one, step_time) == left
