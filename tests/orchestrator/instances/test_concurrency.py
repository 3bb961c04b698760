"""The concurrency limit: just enough in flight to keep an instance busy, learnt."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from orchestrator.instances.concurrency import ROWS_PER_BACKLOG, ConcurrencyLimit, InFlightJob
from protocol import WorkerStats

IDLE = WorkerStats(100, 0, 100, 0, 0, 10.0, 0, 0, 0, 0.5)


def in_flight_job(blocks: int = 1, output: int = 10) -> InFlightJob:
    return InFlightJob(5, output, blocks, False)


def test_a_long_prompt_is_no_row_until_it_is_computed() -> None:
    concurrency = ConcurrencyLimit(0)
    concurrency.set_max_running(64)
    concurrency.best_rows = 8
    long, short = InFlightJob(1500, 10, 1, True), InFlightJob(20, 10, 1, True)
    concurrency.add(long, 0)
    concurrency.add(short, 1)
    assert concurrency.limit == 9
    concurrency.pause(long)
    assert concurrency.limit == 8
    concurrency.resume(long, 1)
    assert concurrency.limit == 9
    concurrency.prompt_computed(long)
    assert concurrency.limit == 8


def test_slots_that_may_have_been_idle_grow_the_backlog_and_long_waits_shrink_it() -> None:
    concurrency = ConcurrencyLimit(32)
    concurrency.set_max_running(256)
    concurrency.observe(IDLE)
    least = concurrency.limit

    def starts(wait_ms: float, load: int) -> int:
        for _ in range(200):
            job = in_flight_job()
            concurrency.add(job, load)
            concurrency.started(job, wait_ms)
            concurrency.remove(job)
        return concurrency.limit

    assert starts(5.0, load=10) == least, "a slot was free: nothing can be said"
    assert starts(5.0, load=256) == 256 + 256 // ROWS_PER_BACKLOG
    assert starts(100.0, load=256) == 257, "one is enough, and still there"


def test_kv_memory_bounds_the_window_and_rows_do_else() -> None:
    concurrency = ConcurrencyLimit(4)
    concurrency.set_max_running(64)
    assert concurrency.slots == 64
    for load in range(20):
        concurrency.add(in_flight_job(blocks=10), load)
    concurrency.observe(replace(IDLE, running=20, kv_blocks_used=80, kv_blocks_free=20))
    assert concurrency.slots == 22
    concurrency.observe(replace(IDLE, running=64, kv_blocks_free=5))
    assert concurrency.slots == 64
    concurrency.observe(replace(IDLE, running=0, kv_blocks_free=0))
    assert concurrency.slots == 1


def test_what_waits_in_the_worker_makes_it_smaller_and_never_below_one() -> None:
    concurrency = ConcurrencyLimit(8)
    concurrency.set_max_running(64)
    assert concurrency.limit == 66
    for _ in range(200):
        concurrency.observe(replace(IDLE, running=64, waiting=9))
    assert concurrency.limit == 65
    concurrency.set_max_running(15)
    assert concurrency.limit == 15  # none for few slots


def test_dl7_load_ahead_counts_what_is_left_of_each_job() -> None:
    concurrency = ConcurrencyLimit(4)
    concurrency.set_max_running(2)
    jobs = [InFlightJob(100, 40, 1, is_computing) for is_computing in (True, True, False)]
    for i, job in enumerate(jobs):
        concurrency.add(job, i)
    load = concurrency.outstanding_work(3)
    assert (load.running, load.waiting) == (2, 1)
    assert load.prefill_tokens == 200
    assert load.decode_tokens == 40 * (1 + 1)
    concurrency.remove(jobs[0])
    concurrency.remove(jobs[0])
    assert concurrency.outstanding_work(2).prefill_tokens == 100
    concurrency.prompt_computed(jobs[1])
    concurrency.prompt_computed(jobs[1])
    assert concurrency.outstanding_work(2).prefill_tokens == 0
    decode_tokens = concurrency.outstanding_work(5).decode_tokens
    assert decode_tokens == 40 * (1 + 3), "others' jobs are like ours"


class Windows(RuleBasedStateMachine):
    """Any order of news leaves the sums right and the limit in its bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.concurrency = ConcurrencyLimit(6)
        self.jobs: list[InFlightJob] = []
        self.paused: list[InFlightJob] = []
        self.over_: list[InFlightJob] = []

    @rule(slots=st.integers(0, 9))
    def serves(self, slots: int) -> None:
        self.concurrency.set_max_running(slots)

    @rule(running=st.integers(0, 9), waiting=st.integers(0, 20), free=st.integers(0, 50))
    def observe(self, running: int, waiting: int, free: int) -> None:
        self.concurrency.observe(
            replace(IDLE, running=running, waiting=waiting, kv_blocks_free=free)
        )

    @rule(blocks=st.integers(0, 9), output=st.integers(1, 9), computing=st.booleans())
    def sent(self, blocks: int, output: int, computing: bool) -> None:
        job = InFlightJob(3, output, blocks, computing)
        self.concurrency.add(job, len(self.jobs))
        self.jobs.append(job)

    @rule(data=st.data(), wait_ms=st.floats(0, 1e4))
    def started(self, data: st.DataObject, wait_ms: float) -> None:
        if self.jobs:
            self.concurrency.started(data.draw(st.sampled_from(self.jobs)), wait_ms)

    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        if self.jobs:
            self.concurrency.prompt_computed(data.draw(st.sampled_from(self.jobs)))

    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        if running := [job for job in self.jobs if job not in self.over_]:
            job = data.draw(st.sampled_from(running))
            if job not in self.paused:
                self.concurrency.pause(job)
                self.paused.append(job)

    @rule(data=st.data(), load=st.integers(0, 9))
    def resume(self, data: st.DataObject, load: int) -> None:
        if self.paused:
            job = data.draw(st.sampled_from(self.paused))
            self.paused.remove(job)
            self.concurrency.resume(job, load)

    @rule(data=st.data())
    def over(self, data: st.DataObject) -> None:
        if self.jobs:
            job = data.draw(st.sampled_from(self.jobs))
            self.concurrency.remove(job)
            self.over_.append(job)
            if job in self.paused:
                self.paused.remove(job)

    @invariant()
    def sums_are_right(self) -> None:
        self.concurrency.check_integrity()
        self.concurrency.outstanding_work(4)
        assert self.concurrency.paused == len(self.paused)
        assert self.concurrency.paused_blocks == sum(job.blocks for job in self.paused)
        here = [job for job in self.jobs if job not in self.over_]
        assert self.concurrency.blocks == sum(job.blocks for job in here)


Windows.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
TestWindows = Windows.TestCase
