"""Who may open a lane, drain the worker and generate; and what becomes of a forgotten drain."""

import logging
import math
import mmap
import time
from pathlib import Path

import msgspec
import pytest

from protocol import (
    PROTOCOL_VERSION,
    Cancel,
    Code,
    Drain,
    Open,
    Sampling,
    Submit,
    decode_message,
    encode,
)
from protocol.tensors import LANE_MESSAGE, TEXT_INPUT
from tests.support.triton_calls import FakeEngine, FakeResponder, plain_call
from tests.worker.service.conftest import Harness, serving
from worker.service import drain
from worker.service.call import Call, strings
from worker.service.drain import Drainer
from worker.service.emitter import Emitter
from worker.service.triton_request import restrict_shared_memory
from worker.text import Tokenizer

TOKEN = "a-lane-token-of-the-test"
WRONG = ("", TOKEN[:-1], "ä\U0001f512")


@pytest.mark.parametrize("token", WRONG)
def test_a_stranger_gets_no_lane_and_learns_nothing(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, token: str
) -> None:
    """Neither the card with its hash salt nor the hashes of cached blocks."""
    with serving(tokenizer, token=TOKEN, lane_token=TOKEN) as harness:
        for _ in range(3):
            request = harness.send(Open(PROTOCOL_VERSION, "stranger", token))
            request.wait_final()
            (frame,) = request.frames()
            assert frame.error is not None and frame.error.code == Code.UNAUTHENTICATED
            assert "TIDEGATE_LANES__TOKEN" in frame.error.message
            assert (frame.card, frame.cache, frame.stats) == (None, None, None)
        refused = [r for r in caplog.records if "wrong token" in r.message]
        assert len(refused) == 1, "a line for each would fill the disk"
        assert TOKEN not in caplog.text and (not token or token not in caplog.text)


@pytest.mark.parametrize("token", WRONG)
def test_a_stranger_cannot_drain_the_worker(tokenizer: Tokenizer, token: str) -> None:
    with serving(tokenizer, token=TOKEN, lane_token=TOKEN) as harness:
        request = harness.send(Drain(0.0, token))
        assert request.refusal()[0] == Code.UNAUTHENTICATED
        job, _ = harness.submit(1)
        harness.finish(job)
        assert harness.wait_end(1).code is None, "it still serves"
        request = harness.send(Drain(0.0, TOKEN))
        request.wait_final()
        assert request.error is None
        harness.lane.wait_final()


def test_without_a_token_anybody_may_and_the_log_says_so_once(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tokenizer, lane_token="") as harness:
        harness.send(Open(PROTOCOL_VERSION, "another", "whatever")).wait(
            lambda: True, "nothing: it is open"
        )
        said = [r for r in caplog.records if "TIDEGATE_WORKER__LANE_TOKEN" in r.message]
        assert [r.levelno for r in said] == [logging.WARNING]
    caplog.clear()
    with serving(tokenizer, token=TOKEN, lane_token=TOKEN):
        assert "no lane token" not in caplog.text


@pytest.mark.parametrize("shown", [None, "", "nearly", 7, True])
def test_a_plain_request_shows_the_token_that_is_asked(tokenizer: Tokenizer, shown: object) -> None:
    with serving(tokenizer, plain__token="right") as harness:
        stranger, friend = FakeResponder(), FakeResponder()
        parameters = {} if shown is None else {"token": shown}
        harness.service.accept(plain_call("ab", stranger, parameters=parameters))
        code, message = stranger.refusal()
        assert code == Code.UNAUTHENTICATED and "request parameter token" in message
        harness.service.accept(plain_call("ab", friend, parameters={"token": "right"}))
        (job,) = harness.engine.wait_submitted(1)
        harness.finish(job)
        friend.wait_final()
        assert friend.error is None


def test_a_drain_that_nobody_follows_is_taken_back(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One message must not take a worker out of service for good."""
    monkeypatch.setattr(drain, "HOLD_S", 0.05)
    with serving(tokenizer) as harness:
        harness.send(Drain(0.0)).wait_final()
        harness.lane.wait_final()
        responder = _lane_again(harness)
        assert responder.frames()[0].card is not None
        assert not responder.frames()[0].draining
        assert "not stopped since: accepting work again" in caplog.text


def test_a_worker_that_stops_stays_drained() -> None:
    engine, now = FakeEngine(), 0.0
    emitter = Emitter(engine, heartbeat_s=1.0, clock=lambda: now)
    drainer = Drainer(engine, emitter, lambda: now)
    drainer.begin(0.0, FakeResponder())
    drainer.begin(0.0, None)
    for _ in range(3):
        now += 10 * drain.HOLD_S
        drainer.advance()
        assert emitter.draining


@pytest.mark.parametrize("grace_ms", [-1.0, math.nan, math.inf, 1e300])
def test_a_grace_beyond_reason_is_refused(harness: Harness, grace_ms: float) -> None:
    request = harness.send(Drain(grace_ms))
    code, message = request.refusal()
    assert code == Code.INVALID_REQUEST and "grace_ms" in message


def _lane_again(harness: Harness) -> FakeResponder:
    """Open lanes until one is taken."""
    give_up_at = time.monotonic() + 60
    for number in range(100_000):
        responder = harness.send(Open(PROTOCOL_VERSION, f"lane-{number}"))
        responder.wait(lambda r=responder: r.sent, "an answer")
        if responder.frames()[0].error is None:
            return responder
        assert time.monotonic() < give_up_at, "it stays drained"
        time.sleep(0.005)
    raise AssertionError("unreachable")


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_ids": [1, -1]},
        {"token_ids": [2**32] * 40},
        {"token_ids": [256]},
        {"budget_ms": math.nan},
        {"first_token_budget_ms": math.nan},
        {"sampling": Sampling(max_tokens=5, top_k=2**63)},  # it would fail everybody's step
    ],
)
def test_a_job_that_cannot_be_is_refused_before_the_engine(
    harness: Harness, wrong: dict[str, object]
) -> None:
    message = Submit("lane", 5, [1, 2], Sampling(max_tokens=1), 1000.0)
    request = harness.send(msgspec.structs.replace(message, **wrong))
    assert harness.wait_end(5).code == Code.INVALID_REQUEST
    request.wait_final()
    assert not harness.engine.submitted and not harness.service.emitter.job_replies


def test_a_message_for_a_lane_of_another_instance_says_so(harness: Harness) -> None:
    """The orchestrator takes this code for a lane that it has to open again."""
    request = harness.send(Cancel("somewhere else", [1]))
    assert request.refusal()[0] == Code.LANE_CLOSED


@pytest.mark.parametrize(
    "data",
    [
        encode(Cancel("xy", [1])).replace(b"xy", b"\xff\xfe"),
        encode(Open(PROTOCOL_VERSION, "xy")).replace(b"open", b"op\xc3n"),
        b"\x91" * 5000,
        b"\x81\xa4type\x91" + b"\x91" * 100_000,
        b"",
        b"\xc1",
        b"\xdf\xff\xff\xff\xff",
    ],
)
def test_bytes_that_are_no_message_are_refused_without_a_traceback(
    harness: Harness, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_message(data)
    responder = FakeResponder()
    harness.service.accept(
        Call({TEXT_INPUT: strings(b""), LANE_MESSAGE: strings(data)}, {}, "", responder)
    )
    assert responder.refusal()[0] == Code.INVALID_REQUEST
    assert not [r for r in caplog.records if r.exc_info]


def test_mapped_regions_are_for_their_owner_only(tmp_path: Path) -> None:
    for name in ("mapped", "with a space", "not_mapped"):
        (tmp_path / name).write_bytes(bytes(4096))
        (tmp_path / name).chmod(0o644)
    with (
        (tmp_path / "mapped").open("r+b") as one,
        (tmp_path / "with a space").open("r+b") as two,
        mmap.mmap(one.fileno(), 4096),
        mmap.mmap(two.fileno(), 4096),
    ):
        restrict_shared_memory(directory=f"{tmp_path}/")
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"mapped": 0o600, "with a space": 0o600, "not_mapped": 0o644}


def test_what_cannot_be_restricted_is_no_error(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    restrict_shared_memory(maps)
    maps.write_text(
        f"7f00-7f01 rw-s 0 00:01 5     {tmp_path}/gone (deleted)\n7f00-7f01 rw-p 0 0 0\n"
    )
    restrict_shared_memory(maps, f"{tmp_path}/")
