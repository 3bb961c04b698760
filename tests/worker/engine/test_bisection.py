"""A step that fails costs those only with whom it fails by itself."""

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import Code, FinishReason
from tests.support.engine import Bench, end_of, ids_of
from worker.scheduler.plan import Plan


@settings(deadline=None, max_examples=25)
@given(
    prompts=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    share=st.sets(st.integers(0, 7)),
    begun=st.integers(0, 4),
)
def test_only_the_guilty_fail(prompts: list[int], share: set[int], begun: int) -> None:
    bench = Bench(max_running=8, max_step_tokens=16)
    jobs = [bench.submit(prompt) for prompt in prompts]
    guilty = [job for i, job in enumerate(jobs) if i in share]
    events = bench.step(begun)

    def fail_with_the_guilty(plan: Plan) -> None:
        if any(row.request.job is job for row in plan.rows for job in guilty):
            raise IndexError("index 5 is out of bounds")

    bench.runner.during = fail_with_the_guilty
    events += bench.finish()
    for job in jobs:
        end = end_of(job, events)
        if job in guilty:
            assert (end.reason, end.code) == (FinishReason.ERROR, Code.ENGINE_ERROR)
            assert "IndexError" in end.message and "bounds" not in end.message
        else:
            assert end.reason is FinishReason.LENGTH
            assert ids_of(job, events) == [7] * 8
    assert bench.is_clean
