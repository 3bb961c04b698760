import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protocol import Code, Sampling, prefix_salt
from tests.support.cases import for_each
from tests.support.engine import config
from worker.core import Job
from worker.scheduler.block_pool import BlockPool
from worker.scheduler.plan import Plan, Row
from worker.scheduler.request import PENDING, Request
from worker.scheduler.scheduler import Scheduler


def request(
    prompt: int | list[int] = 3,
    max_tokens: int = 8,
    deadline: float = math.inf,
    salt: str = "",
    *,
    first_token_by: float = math.inf,
    token_gap_s: float = math.inf,
) -> Request:
    ids = [9] * prompt if isinstance(prompt, int) else prompt
    job = Job(
        ids,
        Sampling(max_tokens=max_tokens),
        deadline,
        cache_salt=salt,
        first_token_by=first_token_by,
        token_gap_s=token_gap_s,
    )
    return Request(job, submitted_at=0.0, own_seed=0)


class FakeMemory:
    """Per block and offset: salt and all tokens up to there, as KV depends on every one of them."""

    def __init__(self, pool: BlockPool, block_tokens: int) -> None:
        self.pool = pool
        self.block_tokens = block_tokens
        self.cells: list[list[object]] = [[None] * block_tokens for _ in range(pool.total)]

    def compute(self, plan: Plan) -> None:
        """Write what each row computes, then read all that it attends to."""
        for row in plan.rows:
            self._write(row)
        for row in plan.rows:
            self._read(row)

    def _write(self, row: Row) -> None:
        request = row.request
        for position in range(row.start, row.start + row.count):
            block = request.blocks[position // self.block_tokens]
            assert self.pool._hashes[block] is None, "a named block is written"
            assert self.pool._references[block] == 1, "a shared block is written"
            self.cells[block][position % self.block_tokens] = self.content(row, position)

    def _read(self, row: Row) -> None:
        request = row.request
        for position in range(row.start + row.count):
            block = request.blocks[position // self.block_tokens]
            found = self.cells[block][position % self.block_tokens]
            assert found == self.content(row, position), f"position {position} is not its own"

    @staticmethod
    def content(row: Row, position: int) -> tuple[str, tuple[int, ...]]:
        request = row.request
        return request.job.cache_salt, tuple(request.tokens[: position + 1])


class SchedulerMachine(RuleBasedStateMachine):
    """Submit, fork, step, pause, resume, cancel, expire, evict and finish in any order.

    Nothing leaks, no limit is passed, and what a request reads is what it would have computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.config = config(max_running=3, max_waiting=3, max_step_tokens=7)
        self.scheduler = Scheduler(self.config, BlockPool(18))
        self.memory = FakeMemory(self.scheduler.pool, self.config.block_tokens)
        self.now = 0.0
        self.alive: list[Request] = []
        self.texts: list[tuple[str, list[int]]] = []

    @rule(
        prompt=st.integers(0, 70) | st.lists(st.integers(9, 10), max_size=40),
        max_tokens=st.integers(1, 40),
        left_s=st.floats(0, 30) | st.just(math.inf),
        salt=st.sampled_from(["", "", "tenant"]),
        first_s=st.floats(0, 30) | st.just(math.inf),
        gap_s=st.floats(1e-6, 1) | st.just(math.inf),
    )
    def submit(
        self,
        prompt: int | list[int],
        max_tokens: int,
        left_s: float,
        salt: str,
        first_s: float = math.inf,
        gap_s: float = math.inf,
    ) -> None:
        by = self.now + first_s
        new = request(
            prompt, max_tokens, self.now + left_s, salt, first_token_by=by, token_gap_s=gap_s
        )
        new.submitted_at = self.now
        self.scheduler.prefix_cache.hash_prompt(new, prefix_salt(b"model", salt))
        held = len(self.alive)
        refusal = self.scheduler.enqueue(new, self.now)
        if refusal is None:
            self.alive.append(new)
            assert held < self.config.max_running + self.config.max_waiting
            assert 0 < new.prompt_tokens < new.limit_tokens <= self.config.context_tokens
        elif refusal.code is Code.NO_CAPACITY:
            assert held == self.config.max_running + self.config.max_waiting

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), more=st.lists(st.integers(9, 11), max_size=6), kept=st.integers(0, 40))
    def fork(self, data: st.DataObject, more: list[int], kept: int) -> None:
        """Go on from where another one was, or from somewhere before that."""
        salt, text = data.draw(st.sampled_from(self.texts))
        self.submit([*text[: len(text) - kept], *more], 5, 30.0, salt)

    @rule(new_tokens=st.integers(1, 3))
    def step(self, new_tokens: int) -> None:
        queue = list(self.scheduler.waiting)
        schedule = self.scheduler.schedule()
        if queue and queue[0] not in schedule.started:
            assert queue[0].backfilled_past <= 2 * self.config.max_running
        plan = schedule.plan
        if plan is None:
            assert not self.scheduler.running
            ready = [one for one in self.scheduler.waiting if not one.held_back]
            assert not ready or self.scheduler.paused, "the pool idles"
            return
        self.memory.compute(plan)
        assert 0 < plan.tokens <= self.config.max_step_tokens
        assert plan.tokens == sum(row.count for row in plan.rows)
        assert len({row.request.slot for row in plan.rows}) == len(plan.rows)
        decoding = [r for r in self.scheduler.running if len(r.tokens) - r.computed == 1]
        computing = {row.request for row in plan.rows}
        assert computing >= {one for one in decoding if one.begun}, "a decode was left out"
        for i, row in enumerate(plan.rows):
            one = row.request
            assert row.start == one.computed
            assert row.samples == (row.start + row.count == len(one.tokens))
            assert i >= plan.decodes or row.count == 1
            room = one.limit_tokens - len(one.tokens)
            new_ids = [7] * min(new_tokens, room) if row.samples else []
            self.scheduler.advance(row, new_ids)
            self.fill_in(row, new_ids)
            if len(one.tokens) == one.limit_tokens:
                self.end(one)

    def fill_in(self, row: Row, new_ids: list[int]) -> None:
        """A runner that makes several tokens has the KV of all but the last of them."""
        if len(new_ids) > 1:
            start = row.start + row.count
            for position in range(start, start + len(new_ids) - 1):
                block = row.request.blocks[position // self.memory.block_tokens]
                offset = position % self.memory.block_tokens
                self.memory.cells[block][offset] = self.memory.content(row, position)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.end(self.alive[data.draw(st.integers(0, len(self.alive) - 1))])

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.scheduler.running))
        blocks, computed = list(one.blocks), one.computed
        self.scheduler.pause(one)
        assert (one.blocks, one.computed, one.slot) == (blocks, computed, -1)

    @precondition(lambda self: self.scheduler.paused)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.scheduler.paused))
        is_full = len(self.scheduler.running) == self.config.max_running
        assert self.scheduler.resume(one) == (not is_full)

    @precondition(lambda self: self.scheduler.waiting)
    @rule(data=st.data(), held=st.booleans())
    def hold(self, data: st.DataObject, held: bool) -> None:
        data.draw(st.sampled_from(self.scheduler.waiting)).held_back = held
        self.scheduler.unblock()

    @rule(passed_s=st.floats(0, 10))
    def expire(self, passed_s: float) -> None:
        self.now += passed_s
        floor = self.now + self.config.min_start_budget_s
        for one in [one for one in self.scheduler.waiting if one.job.deadline <= floor]:
            self.end(one)

    @rule()
    def evict(self) -> None:
        self.scheduler.pool.forget()

    def end(self, one: Request) -> None:
        if one.blocks:
            self.texts = [*self.texts[-5:], (one.job.cache_salt, list(one.tokens))]
        self.scheduler.release(one)
        self.alive.remove(one)

    @invariant()
    def nothing_leaks(self) -> None:
        scheduler = self.scheduler
        scheduler.check_integrity()
        everyone = [*scheduler.running, *scheduler.waiting, *scheduler.paused]
        assert set(everyone) == set(self.alive) and len(everyone) == len(self.alive)
        assert len(scheduler.running) <= self.config.max_running
        if not self.alive:
            assert scheduler.pool.used_count == 0

    def teardown(self) -> None:
        for one in list(self.alive):
            self.end(one)
        self.nothing_leaks()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_decodes_come_before_chunks_and_chunks_share_what_is_left() -> None:
    scheduler = Scheduler(config(max_step_tokens=8), BlockPool(64))
    running = request(prompt=2)
    queued(scheduler, running)
    run_steps(scheduler)
    first, second = request(20, deadline=9.0), request(5, deadline=10.0)
    queued(scheduler, first, second)
    assert run_steps(scheduler, 5) == [
        [(running, 2, 1), (first, 0, 7)],
        [(running, 3, 1), (first, 7, 7)],
        [(running, 4, 1), (first, 14, 6), (second, 0, 1)],
        [(running, 5, 1), (first, 20, 1), (second, 1, 4)],
        [(running, 6, 1), (first, 21, 1), (second, 5, 1)],
    ]


def run_steps(scheduler: Scheduler, steps: int = 1) -> list[list[tuple[Request, int, int]]]:
    """What each step computed: request, first position, count. Every sampled token is a 7."""
    done = []
    for _ in range(steps):
        plan = scheduler.schedule().plan
        done.append([(row.request, row.start, row.count) for row in plan.rows] if plan else [])
        for row in plan.rows if plan else []:
            scheduler.advance(row, [7] if row.samples else [])
            if len(row.request.tokens) == row.request.limit_tokens:
                scheduler.release(row.request)
        scheduler.check_integrity()
    return done


def queued(scheduler: Scheduler, *requests: Request) -> None:
    for one in requests:
        assert scheduler.enqueue(one, 0.0) is None


def labelled(scheduler: Scheduler, *requests: Request) -> None:
    for one in requests:
        scheduler.prefix_cache.hash_prompt(one, b"")
    queued(scheduler, *requests)


def test_a_large_request_is_not_delayed_by_small_ones() -> None:
    """What would still hold blocks when the large one could have them waits its turn."""
    scheduler = Scheduler(config(max_step_tokens=64), BlockPool(16))
    first, large, long = request(40, 8, 1.0), request(44, 12, 2.0), request(1, 12, 3.0)
    queued(scheduler, first, large, long)
    assert scheduler.schedule().started == [first]
    assert scheduler.schedule().started == []
    scheduler.release(first)
    assert scheduler.schedule().started == [large]


def test_what_does_not_delay_the_head_need_not_wait() -> None:
    """The pool is not left idle: 4 blocks are free, and the short one is gone in time."""
    scheduler = Scheduler(config(max_step_tokens=64), BlockPool(16))
    first, large, short = request(40, 8, 1.0), request(40, 8, 2.0), request(1, 5, 3.0)
    queued(scheduler, first, large, short)
    assert scheduler.schedule().started == [first, short]
    steps = 0
    while large.slot < 0:
        run_steps(scheduler)
        steps += 1
    assert steps == 9  # the first one's 8, and then it starts


def test_a_large_request_does_not_starve() -> None:
    """However many small ones come, only so many go first."""
    scheduler = Scheduler(config(max_step_tokens=64, max_waiting=10**6), BlockPool(16))
    holder, large = request(20, 40, 1.0), request(40, 20, 2.0)
    queued(scheduler, holder, large)
    scheduler.schedule()
    overtook = 0
    for _ in range(100):
        queued(scheduler, request(1, 1, 3.0))
        started = scheduler.schedule().started
        overtook += len(started)
        for one in started:
            scheduler.release(one)
    assert overtook == large.backfilled_past == 2 * scheduler.config.max_running
    scheduler.release(holder)
    assert scheduler.schedule().started[0] is large


def test_least_slack_counts_the_work_that_is_left() -> None:
    """DL-8 inside the worker: a later deadline with more to do comes first."""
    scheduler = Scheduler(config(max_running=1), BlockPool(64))
    scheduler.step_time.prefilled(1.0, 10)
    short, long = request(10, 1, deadline=20.0), request(60, 1, deadline=22.0)
    queued(scheduler, short, long)
    assert scheduler.schedule().started == [long]


@for_each(
    ("plain_s", "limits", "gap_s", "chunk"),
    [
        # A prompt has 50 ms of a step, at 5 ms a token.
        (0.01, {}, math.inf, 10),
        # It may double a step that is slow anyway, and gets on however slow it is.
        (0.101, {}, math.inf, 20),
        (0.01, {"max_stall_s": 0.001}, math.inf, 4),
        # DL-14: a decode's gap leaves it less, one block at least.
        (0.01, {}, 1.0, 10),
        (0.01, {}, 0.041, 6),
        (0.01, {}, 0.001, 4),
        # A step takes as long as one with the whole of its last tile.
        (0.01, {"tile_tokens": 12}, math.inf, 10),  # with the two decodes, a whole one as it is
        (0.01, {"tile_tokens": 8}, math.inf, 14),  # the second tile is half full
        (0.01, {"tile_tokens": 8}, 0.0601, 6),  # the same ten, and no more than that
        (0.01, {"tile_tokens": 9}, math.inf, 7),  # the second tile would have three
        (0.01, {"tile_tokens": 8}, 0.036, 4),  # no tile is filled, but a block goes at least
        (0.01, {"tile_tokens": 24}, math.inf, 22),
        (0.01, {"tile_tokens": 32}, math.inf, 4),
    ],
)
def test_prompts_do_not_stall_decodes(
    plain_s: float, limits: dict[str, float], gap_s: float, chunk: int
) -> None:
    """DL-14."""
    scheduler = Scheduler(
        config(**{"max_step_tokens": 40, "max_stall_s": 0.051} | limits), BlockPool(64)
    )
    step_time = scheduler.step_time
    step_time.prefilled(plain_s, 0)
    for _ in range(200):
        step_time.prefilled(plain_s + 0.005 * 20, 20)
    assert step_time.prompt_token_s == pytest.approx(0.005)
    relaxed, strict = request(1, 9, token_gap_s=2.0), request(1, 9, token_gap_s=gap_s)
    queued(scheduler, relaxed, strict)
    run_steps(scheduler)
    prompt = request(60, 4, token_gap_s=1e-6)  # its own gap does not count before its first token
    queued(scheduler, prompt)
    assert run_steps(scheduler) == [[(relaxed, 1, 1), (strict, 1, 1), (prompt, 0, chunk)]]
    for one in (relaxed, strict):
        scheduler.release(one)
    alone = min(40, 60 - chunk)
    assert run_steps(scheduler) == [[(prompt, chunk, alone)]], "nothing is stalled"


@for_each(
    ("now", "is_ahead", "chunk"),
    [
        (0.0, False, 18),  # the second token is due in 0.1 s: 0.09 s are left beyond a plain step
        (0.04, False, 10),
        (0.09, False, 6),  # it is late: a token each gap, and what a gap leaves goes to prompts
        (0.0, True, 15),  # a step with one prompt token is under way, which takes 0.015 s
    ],
)
def test_dl14_prompts_take_the_time_by_which_a_row_is_early(
    now: float, is_ahead: bool, chunk: int
) -> None:
    scheduler = Scheduler(config(max_step_tokens=40, max_stall_s=1.0), BlockPool(64))
    scheduler.step_time.prefilled(0.01, 0)
    for _ in range(200):
        scheduler.step_time.prefilled(0.01 + 0.005 * 20, 20)
    early = request(1, 9, first_token_by=0.06, token_gap_s=0.041)
    queued(scheduler, early)
    run_steps(scheduler)
    if is_ahead:
        early.tokens[-1] = PENDING
    queued(scheduler, request(60, 4))
    plan = scheduler.schedule(now).plan
    assert plan is not None
    assert [row.count for row in plan.rows] == [1, chunk]


def test_dl14_the_most_urgent_first_token_is_computed_first() -> None:
    """By the earlier of what the first token and what the whole answer leave."""
    scheduler = Scheduler(config(max_step_tokens=8, max_running=3), BlockPool(64))
    soon = request(8, 1, deadline=50.0, first_token_by=60.0)
    first = request(8, 1, deadline=99.0, first_token_by=20.0)
    late = request(8, 1, deadline=90.0)
    queued(scheduler, late, soon, first)
    assert run_steps(scheduler, 3) == [[(one, 0, 8)] for one in (first, soon, late)]


def test_an_urgent_prompt_does_not_wait_for_a_long_one_under_way() -> None:
    """While a slot is free it is admitted, and its prompt goes first."""
    scheduler = Scheduler(config(max_step_tokens=8), BlockPool(64))
    long, urgent = request(40, 1, deadline=90.0), request(8, 1, deadline=9.0)
    queued(scheduler, long)
    assert run_steps(scheduler) == [[(long, 0, 8)]]
    queued(scheduler, urgent)
    assert run_steps(scheduler, 2) == [[(urgent, 0, 8)], [(long, 8, 8)]]


def test_blocks_that_adoption_gives_back_are_given_out_again() -> None:
    """Each reserves a copy of the common beginning; when the first has computed it, all go on."""
    scheduler = Scheduler(config(max_step_tokens=8, max_running=8, max_waiting=8), BlockPool(62))
    requests = [request([9, 10] * 16 + [11 + i], 7) for i in range(8)]  # 8 + 2 blocks each
    labelled(scheduler, *requests)
    run_steps(scheduler, 6)
    scheduler.check_integrity()
    assert len(scheduler.running) == 8


def test_a_prefix_is_computed_once() -> None:
    """WK-5: also by one that was admitted while it was being computed."""
    scheduler = Scheduler(config(max_step_tokens=12), BlockPool(64))
    head = list(range(10, 30))
    first, second = request([*head, 1, 1]), request([*head, 2, 2, 2], deadline=1e9)
    labelled(scheduler, first, second)
    assert run_steps(scheduler, 4) == [
        [(first, 0, 12)],
        [(first, 12, 10)],
        [(first, 22, 1), (second, 20, 3)],
        [(first, 23, 1), (second, 23, 1)],
    ]
    assert first.blocks[:5] == second.blocks[:5]
    assert not set(first.blocks[5:]) & set(second.blocks[5:])
    assert (first.cached_tokens, second.cached_tokens) == (0, 20)
    assert scheduler.prefix_cache.cached_tokens_total == 20
    assert (
        scheduler.prefix_cache.hit_blocks_total,
        scheduler.prefix_cache.missed_blocks_total,
    ) == (5, 5)


def test_little_in_common_is_not_waited_for() -> None:
    scheduler = Scheduler(config(max_step_tokens=64), BlockPool(64))
    first, second = request([1] * 4 + [2] * 20), request([1] * 4 + [3] * 20)
    labelled(scheduler, first, second)
    assert run_steps(scheduler) == [[(first, 0, 24), (second, 0, 24)]]


def test_a_leader_that_is_gone_is_not_waited_for() -> None:
    scheduler = Scheduler(config(max_step_tokens=12), BlockPool(64))
    first, second = request([5] * 40), request([5] * 40, deadline=1e9)
    labelled(scheduler, first, second)
    run_steps(scheduler)
    scheduler.release(first)
    assert run_steps(scheduler) == [[(second, 12, 12)]]


def test_a_whole_cached_prompt_leaves_a_block_to_compute() -> None:
    """Its last token's logits are needed, and what is shared is never written."""
    scheduler = Scheduler(config(), BlockPool(64))
    for expected in (0, 12, 12):
        one = request([5] * 16, max_tokens=1)
        labelled(scheduler, one)
        run_steps(scheduler)
        assert one.cached_tokens == expected
    one = request([5] * 17, max_tokens=1)
    labelled(scheduler, one)
    assert run_steps(scheduler) == [[(one, 16, 1)]]


def test_only_what_is_not_shared_is_reserved() -> None:
    """Two long prompts with one head fit into a pool that could not hold them apart."""
    scheduler = Scheduler(config(), BlockPool(16))
    first = request([5] * 40 + [1], max_tokens=4)
    labelled(scheduler, first)
    run_steps(scheduler, 3)
    second = request([5] * 40 + [2], max_tokens=4)
    labelled(scheduler, second)
    run_steps(scheduler)
    assert {first, second} == set(scheduler.running)
    assert scheduler.pool.used_count == 14
