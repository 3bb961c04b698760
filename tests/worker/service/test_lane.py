"""Lanes: many jobs on one stream, one frame per step, exactly one End per job."""

import math
import threading

import pytest

from protocol import (
    PROTOCOL_VERSION,
    AbortCause,
    Cancel,
    Code,
    Describe,
    Drain,
    FinishReason,
    Open,
    Pause,
    PromptLogprobs,
    Resume,
    Sampling,
    Submit,
    TokenLogprob,
)
from tests.support.triton_calls import FakeResponder, lane_call, plain_call
from tests.worker.service.conftest import Harness
from worker.core import JobFinished, JobPaused, JobPrompt, JobResumed, JobStarted, JobTokens
from worker.service.emitter import MAX_BACKLOG
from worker.service.lane import Lane


def test_the_first_frame_carries_card_cache_and_statistics(harness: Harness) -> None:
    frame = harness.lane.frames()[0]
    assert frame.seq == 0
    assert frame.card is not None and frame.card.model == "fake"
    assert frame.cache is not None and frame.cache.full
    assert frame.stats is not None and frame.stats.kv_blocks_total == 8
    assert frame.stats.load_ms == 1234.5


def test_tokens_and_end_travel_in_order_and_the_jobs_request_is_closed(harness: Harness) -> None:
    job, request = harness.submit(7)
    harness.begin(job)
    ids = harness.speak(job, "hello")
    harness.finish(job)
    end = harness.wait_end(7)
    request.wait_final()
    assert request.sent == []
    assert [i for d in harness.deltas(7) for i in d.ids] == ids
    assert harness.text(7) == "hello"
    assert (end.reason, end.code, end.completion_tokens) == (FinishReason.LENGTH, None, 5)
    frames = harness.lane.frames()
    assert [frame.seq for frame in frames] == list(range(len(frames)))
    assert [s.handle for f in frames for s in f.started] == [7]


def test_one_frame_carries_one_step_of_all_jobs(harness: Harness) -> None:
    jobs = [harness.submit(handle)[0] for handle in range(4)]
    harness.engine.emit(*(JobTokens(job, [65 + i], None) for i, job in enumerate(jobs)))
    harness.lane.wait(lambda: harness.deltas(3), "tokens of the last job")
    (frame,) = [frame for frame in harness.lane.frames() if frame.deltas]
    assert [delta.handle for delta in frame.deltas] == [0, 1, 2, 3]


def test_a_stop_string_ends_the_job_and_is_not_shown(harness: Harness) -> None:
    job, _ = harness.submit(1, stop=("lo",))
    harness.speak(job, "hello world")
    end = harness.wait_end(1)
    assert harness.engine.cancelled == [(job, AbortCause.STOP_STRING)]
    assert harness.text(1) == "hel"
    assert (end.reason, end.code, end.completion_tokens, end.tail) == (
        FinishReason.STOP,
        None,
        5,
        "",
    )
    assert end.stop == "lo"


@pytest.mark.parametrize(("stop", "ids"), [("lo", 5), ("\ufffd", 6)])
def test_a_stop_string_may_end_with_the_last_token_allowed(
    harness: Harness, stop: str, ids: int
) -> None:
    """The engine ends the job before anybody can tell it of the stop string."""
    job, _ = harness.submit(1, stop=(stop,), max_tokens=ids)
    harness.engine.on_cancel = lambda job, cause: None
    spoken = harness.tokenizer.encode("helloé")[:ids]
    harness.engine.emit(
        JobTokens(job, spoken, None),
        JobFinished(job, FinishReason.LENGTH, None, "", 2, ids, 0, 0.0, 0.0, 0.0, 0.0, None),
    )
    end = harness.wait_end(1)
    assert (end.reason, end.code, end.completion_tokens) == (FinishReason.STOP, None, ids)
    assert harness.text(1) + end.tail == "hello".removesuffix(stop)
    assert end.stop == stop


def test_cancel_stops_the_job_with_its_cause_and_is_idempotent(harness: Harness) -> None:
    job, _ = harness.submit(1)
    first = harness.send(Cancel("lane", [1], AbortCause.DISCONNECT))
    end = harness.wait_end(1)
    again = harness.send(Cancel("lane", [1]))
    unknown = harness.send(Cancel("lane", [99]))
    for request in (first, again, unknown):
        request.wait_final()
        assert request.error is None
    assert harness.engine.cancelled == [(job, AbortCause.DISCONNECT)]
    assert end.reason == FinishReason.CANCELLED


def test_pause_and_resume_reach_the_engine_and_come_back_in_frames(harness: Harness) -> None:
    job, _ = harness.submit(3)
    requests = [
        harness.send(message)
        for message in (Pause("lane", 3), Resume("lane", 3), Pause("lane", 99), Resume("lane", 99))
    ]
    for request in requests:
        request.wait_final()
        assert request.error is None
    assert harness.engine.held == [(job, True), (job, False)]
    harness.engine.emit(JobPaused(job))
    harness.lane.wait(lambda: any(f.paused == [3] for f in harness.lane.frames()), "the pause")
    harness.engine.emit(JobResumed(job))
    harness.lane.wait(lambda: any(f.resumed == [3] for f in harness.lane.frames()), "the resume")
    harness.finish(job)
    harness.wait_end(3)
    assert not any(f.paused and f.resumed for f in harness.lane.frames())


def test_a_frame_tells_where_pauses_and_resumes_have_led() -> None:
    """Several within one frame: a job that is in both continues."""
    for told, paused, resumed in (
        ("pr", [1], [1]),
        ("prp", [1], []),
        ("rp", [], []),
        ("rpr", [], [1]),
    ):
        responder = FakeResponder()
        lane = Lane("lane", responder)
        for one in told:
            lane.paused(1) if one == "p" else lane.next_frame().resumed.append(1)
        lane.flush()
        (frame,) = responder.frames()
        assert (frame.paused, frame.resumed) == (paused, resumed), told


def test_wp3_a_lost_lane_stops_all_its_jobs(harness: Harness) -> None:
    """WP-3: the orchestrator is gone, nobody reads: everything of that lane stops."""
    jobs = [harness.submit(handle)[0] for handle in range(3)]
    harness.lane.cancelled = True
    cancelled = harness.engine.wait_cancelled(3)
    assert {job for job, _ in cancelled} == set(jobs)
    assert {cause for _, cause in cancelled} == {AbortCause.LANE_LOST}
    harness.lane.wait_final()


def test_a_send_that_triton_refuses_loses_the_lane(harness: Harness) -> None:
    job, request = harness.submit(1)
    harness.lane.lost = True
    harness.speak(job, "x")
    assert harness.engine.wait_cancelled(1) == [(job, AbortCause.LANE_LOST)]
    request.wait_final()
    harness.lane.lost = False
    harness.lane.finals = 1  # lost senders end themselves


def test_wp3_a_slow_reader_loses_nothing_and_its_cancel_is_seen(harness: Harness) -> None:
    """WP-3: from 2.75 on Triton does not cancel a stream because its reader is slow."""
    job, _ = harness.submit(1)
    steps = 2 * MAX_BACKLOG + 2  # one backlog is being sent, and another waits
    engine = threading.Thread(target=lambda: [harness.speak(job, "x") for _ in range(steps)])
    with harness.lane.changed:  # takes no response
        engine.start()
        engine.join(0.1)
        assert engine.is_alive() and not harness.engine.cancelled
    harness.lane.wait(lambda: harness.text(1) == "x" * steps, "all that was spoken")
    with harness.lane.changed:
        harness.speak(job, "y")
        harness.lane.cancelled = True
    assert harness.engine.wait_cancelled(1) == [(job, AbortCause.LANE_LOST)]


def test_an_idle_lane_beats(harness: Harness) -> None:
    seen = len(harness.lane.sent)
    harness.lane.wait(lambda: len(harness.lane.sent) >= seen + 2, "two heartbeats")
    assert harness.lane.frames()[-1].stats is not None


def test_messages_that_make_no_sense_are_answered_with_an_error(harness: Harness) -> None:
    sampling = Sampling(max_tokens=1)
    nowhere = harness.send(Submit("no such lane", 1, [1], sampling, 1000.0))
    second = harness.send(Open(PROTOCOL_VERSION, "lane"))
    harness.submit(5)
    twice = harness.send(Submit("lane", 5, [1], sampling, 1000.0))
    for request, word in ((nowhere, "not open"), (second, "open already"), (twice, "in use")):
        assert word in request.refusal()[1]


def test_another_protocol_version_is_told_so(harness: Harness) -> None:
    request = harness.send(Open(PROTOCOL_VERSION + 1, "newer"))
    request.wait_final()
    (frame,) = request.frames()
    assert frame.error is not None and frame.error.code == Code.PROTOCOL_VERSION


def test_drain_announces_waits_ends_the_rest_and_closes_lanes(harness: Harness) -> None:
    job, request = harness.submit(1)
    harness.start(job)
    drain = harness.send(Drain(grace_ms=60_000.0))
    harness.lane.wait(lambda: harness.lane.frames()[-1].draining, "the announcement")
    late = harness.send(Submit("lane", 2, [1], Sampling(max_tokens=1), 1000.0))
    assert harness.wait_end(2).code == Code.DRAINING
    assert not harness.engine.cancelled
    harness.clock.passed_s += 60
    assert harness.engine.wait_cancelled(1) == [(job, AbortCause.DRAIN)]
    harness.wait_end(1)
    for responder in (request, late, drain, harness.lane):
        responder.wait_final()
    newcomer = harness.send(Open(PROTOCOL_VERSION, "newcomer"))
    newcomer.wait_final()
    (frame,) = newcomer.frames()
    assert frame.error is not None and frame.error.code == Code.DRAINING


def test_or14_a_drain_hands_back_what_has_not_started(harness: Harness) -> None:
    """At once, while what runs has its grace, of which each report tells; so has what begins in the
    step under way: its first token is on its way, and another instance may not have its weights
    any more."""
    running, _ = harness.submit(1)
    beginning, _ = harness.submit(3)
    beginning.has_started = True  # as the engine sets it before the step that tells of it
    harness.start(running)
    waiting, _ = harness.submit(2)
    assert all(f.stats.drain_left_ms is None for f in harness.lane.frames() if f.stats)
    harness.send(Drain(grace_ms=60_000.0))
    harness.wait_end(2)
    assert harness.engine.cancelled == [(waiting, AbortCause.DRAIN)]
    (told, *_) = [f for f in harness.lane.frames() if f.draining]
    assert told.stats is not None and 0 < (told.stats.drain_left_ms or 0) <= 60_000
    before = [frame for frame in harness.lane.frames() if frame.seq < told.seq]
    assert not any(frame.ends for frame in before)
    for job, handle in ((running, 1), (beginning, 3)):
        harness.finish(job)
        assert harness.wait_end(handle).code is None


def test_dl14_what_is_left_for_the_parts_counts_from_receipt(harness: Harness) -> None:
    """DL-14: a point on the worker's own clock, as for the deadline; none stated is none."""
    before = harness.service._clock()
    sampling = Sampling(max_tokens=1)
    stated = Submit(
        "lane", 1, [1], sampling, 9000.0, first_token_budget_ms=5000.0, token_gap_ms=20.0
    )
    harness.send(stated)
    harness.send(Submit("lane", 2, [1], sampling, 9000.0))
    harness.service.accept(plain_call("ab", FakeResponder(), parameters={"token_gap_ms": 30}))
    job, other, plain = harness.engine.wait_submitted(3)
    assert 5.0 <= job.first_token_by - before < job.deadline - before - 3.9
    assert job.token_gap_s == 0.02
    assert other.first_token_by == other.token_gap_s == plain.first_token_by == math.inf
    assert plain.token_gap_s == 0.03
    for one in (job, other, plain):
        harness.finish(one)


def test_or16_a_lanes_name_is_not_echoed_at_length(harness: Harness) -> None:
    responder = FakeResponder()
    harness.service.accept(lane_call(Describe("planted" * 15_000), responder))
    assert len(responder.refusal()[1]) < 1024


def test_a_long_prompts_logprobs_come_few_in_a_frame_and_before_its_tokens(
    harness: Harness,
) -> None:
    job, _ = harness.submit(7, prompt_logprobs=0)
    pieces = [
        PromptLogprobs.pack(first, [TokenLogprob(-0.5)] * count)
        for first, count in ((1, 512), (513, 300), (813, 300), (1113, 1))
    ]
    events = [JobPrompt(job, piece) for piece in pieces]
    harness.engine.emit(JobStarted(job, 0.0), *events, JobTokens(job, [65], None))
    harness.finish(job)
    harness.wait_end(7)
    frames = harness.lane.frames()
    told = [[piece.first for _, piece in frame.prompts] for frame in frames if frame.prompts]
    assert told == [[1], [513, 813], [1113]]
    kinds = [
        kind
        for frame in frames
        for kind, part in (("s", frame.started), ("p", frame.prompts), ("d", frame.deltas))
        if part
    ]
    assert "".join(kinds) == "spppd"
    assert [frame.seq for frame in frames] == list(range(len(frames)))


def test_a_job_for_an_adapter_that_is_not_served_never_reaches_the_engine(harness: Harness) -> None:
    harness.send(Submit("lane", 1, [1], Sampling(max_tokens=1), 1000.0, adapter="tone"))
    end = harness.wait_end(1)
    assert (end.code, end.message) == (Code.INVALID_REQUEST, "this worker has no adapter tone")
    assert not harness.engine.submitted
