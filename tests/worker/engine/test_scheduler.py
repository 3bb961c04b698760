import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.worker.engine.harness import config
from worker.engine.block_pool import BlockPool
from worker.engine.core import Job
from worker.engine.request import STARVED, Request, make_request
from worker.engine.scheduler import Scheduler
from worker.protocol import Code, Sampling


def request(prompt: int = 3, max_tokens: int = 8, deadline: float = math.inf) -> Request:
    job = Job([9] * prompt, Sampling(max_tokens=max_tokens), deadline)
    return make_request(job, submitted_at=0.0, own_seed=0)


class SchedulerMachine(RuleBasedStateMachine):
    """Submit, step, cancel, expire and finish in any order: nothing leaks, no limit is passed."""

    def __init__(self) -> None:
        super().__init__()
        self.config = config(max_running=3, max_waiting=3, max_step_tokens=7)
        self.scheduler = Scheduler(self.config, BlockPool(18))
        self.now = 0.0
        self.alive: list[Request] = []

    @rule(
        prompt=st.integers(0, 70),
        max_tokens=st.integers(1, 40),
        left_s=st.floats(0, 30) | st.just(math.inf),
    )
    def submit(self, prompt: int, max_tokens: int, left_s: float) -> None:
        new = request(prompt, max_tokens, self.now + left_s)
        new.submitted_at = self.now
        held = len(self.alive)
        refusal = self.scheduler.enqueue(new, self.now)
        if refusal is None:
            self.alive.append(new)
            assert held < self.config.max_running + self.config.max_waiting
            assert 0 < prompt < new.limit_tokens <= self.config.context_tokens
        elif refusal.code is Code.NO_CAPACITY:
            assert held == self.config.max_running + self.config.max_waiting

    @rule(new_tokens=st.integers(1, 3))
    def step(self, new_tokens: int) -> None:
        queue = list(self.scheduler.waiting)
        schedule = self.scheduler.schedule()
        assert schedule.started == queue[: len(schedule.started)], "somebody overtook"
        plan = schedule.plan
        if plan is None:
            assert not self.scheduler.running
            return
        assert 0 < plan.tokens <= self.config.max_step_tokens
        assert plan.tokens == sum(row.count for row in plan.rows)
        assert len({row.request.slot for row in plan.rows}) == len(plan.rows)
        decoding = [r for r in self.scheduler.running if len(r.tokens) - r.computed == 1]
        assert {row.request for row in plan.rows} >= set(decoding), "a decode was left out"
        for i, row in enumerate(plan.rows):
            one = row.request
            assert row.start == one.computed
            assert row.samples == (row.start + row.count == len(one.tokens))
            assert i >= plan.decodes or row.count == 1
            room = one.limit_tokens - len(one.tokens)
            self.scheduler.advance(row, [7] * min(new_tokens, room) if row.samples else [])
            if len(one.tokens) == one.limit_tokens:
                self.end(one)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.end(self.alive[data.draw(st.integers(0, len(self.alive) - 1))])

    @rule(passed_s=st.floats(0, 10))
    def expire(self, passed_s: float) -> None:
        self.now += passed_s
        late = self.scheduler.starved(self.now)
        for one in late:
            self.end(one)
        floor = self.now + self.config.min_start_budget_s
        assert all(one.deadline > floor - 1e-9 for one in self.scheduler.waiting)

    def end(self, one: Request) -> None:
        self.scheduler.release(one)
        self.alive.remove(one)

    @invariant()
    def nothing_leaks(self) -> None:
        scheduler = self.scheduler
        scheduler.check_integrity()
        assert {*scheduler.running, *scheduler.waiting} == set(self.alive)
        assert len(scheduler.running) <= self.config.max_running
        if not self.alive:
            assert scheduler.pool.used_count == 0

    def teardown(self) -> None:
        for one in list(self.alive):
            self.end(one)
        self.nothing_leaks()


TestScheduler = SchedulerMachine.TestCase


def test_least_slack_starts_first() -> None:
    scheduler = Scheduler(config(max_running=1), BlockPool(64))
    late, soon, never = (
        request(deadline=50.0),
        request(deadline=5.0),
        request(deadline=math.inf),
    )
    for one in (never, late, soon):
        assert scheduler.enqueue(one, 0.0) is None
    started = []
    while scheduler.has_work:
        schedule = scheduler.schedule()
        started += schedule.started
        for one in list(scheduler.running):
            scheduler.release(one)
    assert started == [soon, late, never]


def test_equal_deadlines_keep_their_order() -> None:
    scheduler = Scheduler(config(), BlockPool(64))
    first, second = request(), request()
    second.submitted_at = 1.0
    scheduler.enqueue(second, 1.0)
    scheduler.enqueue(first, 1.0)
    assert scheduler.schedule().started == [first, second]


def test_decodes_come_before_chunks_and_chunks_share_what_is_left() -> None:
    scheduler = Scheduler(config(max_step_tokens=8), BlockPool(64))
    running = request(prompt=2)
    scheduler.enqueue(running, 0.0)
    plan = scheduler.schedule().plan
    assert plan is not None
    scheduler.advance(plan.rows[0], [7])
    scheduler.enqueue(request(prompt=20, deadline=9.0), 0.0)
    scheduler.enqueue(request(prompt=5, deadline=10.0), 0.0)
    shapes = []
    for _ in range(4):
        plan = scheduler.schedule().plan
        assert plan is not None
        shapes.append([(row.start, row.count, row.samples) for row in plan.rows])
        for row in plan.rows:
            scheduler.advance(row, [7] if row.samples else [])
    assert shapes == [
        [(2, 1, True), (0, 7, False)],
        [(3, 1, True), (7, 7, False)],
        [(4, 1, True), (14, 6, True), (0, 1, False)],
        [(5, 1, True), (20, 1, True), (1, 4, True)],
    ]


def test_a_large_request_is_not_overtaken_by_small_ones() -> None:
    scheduler = Scheduler(config(), BlockPool(16))
    first, large, small = request(40, 8, 1.0), request(40, 8, 2.0), request(1, 1, 3.0)
    for one in (first, large, small):
        assert scheduler.enqueue(one, 0.0) is None
    assert scheduler.schedule().started == [first]
    scheduler.release(first)
    assert scheduler.schedule().started == [large]


@pytest.mark.parametrize(
    ("prompt", "blocks", "most"), [(64, 64, 63), (16, 4, 15)], ids=["context", "pool"]
)
def test_a_prompt_that_never_fits_is_refused(prompt: int, blocks: int, most: int) -> None:
    refusal = Scheduler(config(), BlockPool(blocks)).enqueue(request(prompt), 0.0)
    assert refusal is not None
    assert refusal.code is Code.CONTEXT_OVERFLOW
    assert f"at most {most}" in refusal.message


def test_max_tokens_is_clipped_to_the_context() -> None:
    one = request(prompt=60, max_tokens=50)
    assert Scheduler(config(), BlockPool(64)).enqueue(one, 0.0) is None
    assert one.limit_tokens == 64


@pytest.mark.parametrize("ids", [[], [100], [3, -1]])
def test_prompts_outside_the_vocabulary_are_refused(ids: list[int]) -> None:
    job = Job(ids, Sampling(max_tokens=1), math.inf)
    one = make_request(job, submitted_at=0.0, own_seed=0)
    refusal = Scheduler(config(), BlockPool(4)).enqueue(one, 0.0)
    assert refusal is not None
    assert refusal.code is Code.INVALID_REQUEST


def test_too_little_time_to_start_is_refused() -> None:
    """DL-3: more than ``min_start_budget`` must be left, exactly that much is too little."""
    scheduler = Scheduler(config(min_start_budget_s=0.5), BlockPool(64))
    assert scheduler.enqueue(request(deadline=10.5), 10.0) is STARVED
    assert scheduler.enqueue(request(deadline=10.75), 10.0) is None


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_step_tokens \(3\).*max_running \(4\)"):
        config(max_step_tokens=3)
