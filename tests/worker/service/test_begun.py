"""Texts that another worker began (OR-10): taken up where it stopped, at any token."""

import pytest

from protocol import FinishReason, Sampling, Submit
from tests.worker.service.conftest import Harness
from worker.core import JobTokens
from worker.text import TextStream

TEXT = "a S⊙ST then STOP it"


def go_on(
    harness: Harness, begun: list[int], handle: int, stop_after: int = 0, **of: object
) -> bool:
    """Send what is left of a job of 100 tokens; whether the engine was asked to go on."""
    known = len(harness.engine.submitted)
    sampling = Sampling(**{"max_tokens": 100 - len(begun)} | of)  # type: ignore[arg-type]
    told = {"begun_tokens": len(begun), "stop_after_tokens": stop_after}
    harness.send(Submit("lane", handle, [1, 2, *begun], sampling, 10_000.0, **told))  # type: ignore[arg-type]
    return len(harness.engine.submitted) > known


@pytest.mark.parametrize("stop_after", [0, 15])
def test_or10_a_text_is_the_same_wherever_it_is_cut(harness: Harness, stop_after: int) -> None:
    """Inside characters and stop strings too: what was held back comes, and nothing twice."""
    ids = harness.tokenizer.encode(TEXT)
    stream = TextStream(harness.tokenizer.detokenizer(), ["STOP"], stop_after)
    fed = stream.feed(ids)
    shown, rest = "".join(fed.texts), stream.flush().text if fed.stopped_at is None else ""
    for cut in range(1, len(ids) + 1):
        before = "".join(fed.texts[:cut])
        if fed.stopped_at is not None and cut > fed.stopped_at + 1:
            break
        if go_on(harness, ids[:cut], cut, stop_after, stop=("STOP",)):
            job = harness.engine.submitted[-1]
            assert job.begun_tokens == cut
            harness.engine.emit(JobTokens(job, ids[cut:], None))
            if fed.stopped_at is None:
                harness.finish(job)
        end = harness.wait_end(cut)
        assert before + harness.text(cut) + end.tail == shown + rest
        assert end.stop == stream.stop
    assert bool(stream.stop) is (stop_after == 0)


def test_or10_a_text_that_lacks_only_its_end_gets_it(harness: Harness) -> None:
    """The first worker died between its last token and the end."""
    half = harness.tokenizer.encode("ab⊙")[:-1]
    assert not go_on(harness, half, 1, max_tokens=0)
    end = harness.wait_end(1)
    assert (end.reason, end.tail, end.code) == (FinishReason.LENGTH, "\ufffd", None)
    assert not go_on(harness, [*half, 7], 2, stop_token_ids=(7,))
    end = harness.wait_end(2)
    assert (end.reason, end.stop_token_id) == (FinishReason.STOP, 7)
    assert not go_on(harness, harness.tokenizer.encode("ab ST"), 3, max_tokens=0, stop=("STOP",))
    assert harness.wait_end(3).tail == "ST"


def test_or10_what_is_wrong_with_such_a_job_is_answered(harness: Harness) -> None:
    assert not go_on(harness, [5], 1, max_tokens=-1)
    assert not go_on(harness, [], 2, max_tokens=0)
    assert not go_on(harness, [5], 3, max_tokens=0, stop=("",))
    for handle in (1, 2, 3):
        assert harness.wait_end(handle).code == "invalid_request"
