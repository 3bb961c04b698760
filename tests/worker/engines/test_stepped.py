"""Deadlines, aborts and accounts over an engine that others wrote."""

import pytest

from protocol import AbortCause, Code, Feature, FinishReason, PromptLogprobs, Sampling, TokenLogprob
from tests.support.backend import SteppedBench
from tests.support.engine import end_of, ids_of, was_started
from worker.core import Job, JobFinished, JobPrompt
from worker.engines.stepped import LONGEST_LEAVE_S, Produced
from worker.grammar.constraint import Constraint


def test_an_error_of_the_backend_ends_one_job() -> None:
    bench = SteppedBench()
    bad, good = bench.submit(4), bench.submit(5)

    def answer(handle: int, job: Job) -> Produced:
        if job is bad:
            return Produced(handle, end=FinishReason.ERROR, message="no such thing")
        return Produced(handle, [7])

    bench.core.answer = answer
    events = bench.finish()
    end = end_of(bad, events)
    assert (end.reason, end.code, end.message) == (
        FinishReason.ERROR,
        Code.ENGINE_ERROR,
        "no such thing",
    )
    assert end_of(good, events).code is None


def test_a_job_that_a_backend_cannot_stomach_costs_nobody_else_theirs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Else one request would end engine after engine: orchestrators try the next instance."""
    bench = SteppedBench()
    good, bad = bench.submit(4), bench.submit(5)
    add = bench.core.add

    def fragile(handle: int, job: Job, max_tokens: int) -> None:
        add(handle, job, max_tokens)
        if job is bad:
            raise TypeError("a secret of the prompt's")

    bench.core.add = fragile  # type: ignore[method-assign]
    events = bench.finish()
    end = end_of(bad, events)
    assert end.code is Code.ENGINE_ERROR and "secret" not in end.message
    assert not was_started(bad, events) and not bench.core.jobs
    assert end_of(good, events).code is None
    assert "could not take up a job: TypeError at" in caplog.text
    assert "secret" not in caplog.text


def test_what_the_engine_lacks_is_refused_by_name() -> None:
    bench = SteppedBench(lacks=[Feature.MIN_P, Feature.GRAMMAR])
    drawn, plain = bench.submit(min_p=0.1), bench.submit()
    constrained = Job([1], Sampling(max_tokens=1), 100.0, constraint=Constraint())
    bench.engine.submit(constrained)
    events = bench.finish()
    assert end_of(plain, events).code is None
    for job, name in ((drawn, "min_p"), (constrained, "grammar")):
        end = end_of(job, events)
        assert end.code is Code.INVALID_REQUEST and f"no {name};" in end.message


def test_a_prompt_is_read_and_nothing_generated() -> None:
    bench = SteppedBench()
    piece = PromptLogprobs.pack(1, [TokenLogprob(-1.0, [], 1)])
    bench.core.answer = lambda handle, job: Produced(handle, [7], prompt=piece)
    job = bench.submit(2, max_tokens=0, prompt_logprobs=0)
    events = bench.finish()
    assert [e.logprobs for e in events if isinstance(e, JobPrompt)] == [piece]
    assert ids_of(job, events) == []
    end = end_of(job, events)
    assert (end.reason, end.completion_tokens) == (FinishReason.LENGTH, 0)


def test_a_job_ends_when_the_backend_has_let_go_of_its_memory_or_too_late() -> None:
    bench = SteppedBench(max_running=1)
    first = bench.submit(max_tokens=20)
    bench.step()
    second = bench.submit(max_tokens=2)
    bench.core.stuck = {1, 2}
    bench.engine.cancel(first, AbortCause.CANCEL)
    events = bench.step(3)
    assert not any(isinstance(event, JobFinished) for event in events)
    assert not was_started(second, events), "its slot is still taken"
    bench.core.stuck = {2}
    events += bench.finish()
    assert end_of(first, events).code is Code.CANCELLED and end_of(second, events).code is None
    stuck = bench.submit(max_tokens=20)
    bench.step()
    bench.core.stuck = {3}
    bench.engine.cancel(stuck, AbortCause.CANCEL)
    assert not any(isinstance(event, JobFinished) for event in bench.step())
    bench.clock.now += LONGEST_LEAVE_S
    assert end_of(stuck, bench.step()).code is Code.CANCELLED


def test_a_backend_that_fails_while_there_is_no_work_is_found_out() -> None:
    bench = SteppedBench()
    assert not bench.engine.has_failed
    bench.core.has_failed = True
    assert bench.engine.has_failed


def test_statistics_add_up() -> None:
    bench = SteppedBench()
    jobs = [bench.submit(n, max_tokens=n) for n in (3, 4, 5)]

    def answer(handle: int, job: Job) -> Produced:
        return Produced(handle, [7], cached_tokens=2)

    bench.core.answer = answer
    events = bench.finish()
    stats = bench.engine.stats()
    ends = [end_of(job, events) for job in jobs]
    assert stats.tokens_total == sum(end.completion_tokens for end in ends) == 12
    assert (stats.jobs_total, stats.running, stats.waiting) == (3, 0, 0)
    assert stats.steps_total == bench.core.steps == 5
    assert stats.busy_ms_total == pytest.approx(50)
    assert stats.step_ms == pytest.approx(10)
    assert stats.prefill_tokens_total == 12
    assert [end.cached_tokens for end in ends] == [2, 2, 2] and stats.cached_tokens_total == 6
    assert (stats.kv_blocks_total, stats.kv_blocks_used, stats.kv_blocks_free) == (64, 0, 64)


def test_a_backend_waits_no_longer_than_to_the_next_deadline() -> None:
    bench = SteppedBench()
    bench.submit(left_s=50.0)
    bench.step()
    bench.submit(left_s=0.15)
    bench.clock.now += 0.02
    bench.step()
    bench.clock.now += 0.07
    bench.step()
    assert bench.core.waits == pytest.approx([0.1, 0.1, bench.core.waits[2]])
    assert 0.02 < bench.core.waits[2] < 0.05, "less a step that may be slow"
