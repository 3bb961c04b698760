"""DL-1, DL-2, DL-14: every spelling of a deadline, and what cannot be read."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from orchestrator.api.http.deadlines import read_deadline, read_parts
from orchestrator.clock import Instant
from orchestrator.errors import InvalidRequest
from orchestrator.tasks.deadline import NO_PARTS, DeadlineConfig, Parts
from tests.support.cases import for_each

NOW = Instant(mono=50.0, unix=1_800_000_000.0)
POLICY = DeadlineConfig(default_s=300, max_s=1800)


def left_s(*headers: tuple[str, str], body_ms: float | None = None) -> float:
    return read_deadline(CIMultiDict(headers), body_ms, NOW, POLICY).at - NOW.mono


@for_each(
    ("header", "value", "seconds"),
    [
        ("X-Deadline", "2027-01-15T08:00:02Z", 2),
        ("X-Deadline", "2027-01-15t08:00:02.5z", 2.5),
        ("X-Deadline", "2027-01-15T09:30:02+01:30", 2),
        ("X-Deadline", "2027-01-15T08:00:02.1234567890123Z", 2.123456789),
        ("X-Deadline", "2026-12-31T23:59:60Z", 1798761600 - 1_800_000_000),
        ("X-Deadline", "1800000002000", 2),
        ("x-deadline", "1800000002000.5", 2.0005),
        ("grpc-timeout", "2S", 2),
        ("grpc-timeout", "1500m", 1.5),
        ("grpc-timeout", "99999999n", 0.099999999),
        ("grpc-timeout", "2000000u", 2),
        ("grpc-timeout", "1M", 60),
        ("X-Timeout-Ms", "1500", 1.5),
        ("X-Timeout-Ms", " 1500.5 ", 1.5005),
        ("X-Timeout-Ms", "-5", -0.005),
        ("X-Request-Timeout-Seconds", "2.5", 2.5),
        ("x-litellm-timeout", " 1.5 ", 1.5),
        ("x-request-timeout", "500ms", 0.5),
        ("X-Request-Timeout", "2h", 1800),
        ("request-timeout", " 2.5 ", 2.5),
        ("Request-Timeout", "1m30s", 90),
        ("Request-Timeout", "0", 300),
        ("X-Deadline", "2020-01-01T00:00:00Z", 1577836800 - 1_800_000_000),
    ],
)
def test_dl1_every_spelling(header: str, value: str, seconds: float) -> None:
    assert left_s((header, value)) == pytest.approx(seconds, abs=1e-5)


@for_each(
    ("header", "value"),
    [
        ("X-Deadline", "tomorrow"),
        ("X-Deadline", ""),
        ("X-Deadline", "2027-01-15T08:00:02"),
        ("X-Deadline", "2027-13-15T08:00:02Z"),
        ("X-Deadline", "2027-01-15T08:00:60Z"),
        ("X-Deadline", "1e3"),
        ("X-Deadline", "٢٠٢٧"),
        ("grpc-timeout", "5"),
        ("grpc-timeout", "123456789S"),
        ("grpc-timeout", "-1S"),
        ("grpc-timeout", "1.5S"),
        ("X-Timeout-Ms", "1500ms"),
        ("X-Timeout-Ms", "inf"),
    ],
)
def test_dl1_unreadable_is_an_error_that_names_the_header(header: str, value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        left_s((header, value))
    assert caught.value.field == header
    assert caught.value.status == 400


def test_dl1_the_earliest_wins() -> None:
    assert left_s(
        ("X-Timeout-Ms", "3000"), ("grpc-timeout", "2S"), ("X-Timeout-Ms", "1000"), body_ms=4000
    ) == pytest.approx(1)
    assert left_s(("X-Timeout-Ms", "3000"), body_ms=500) == pytest.approx(0.5)
    others = [("x-litellm-timeout", "3"), ("X-Timeout-Ms", "2000")]
    assert left_s(*others, ("x-request-timeout-seconds", "1")) == pytest.approx(1)
    assert left_s(*others, ("X-Timeout-Ms", "2500")) == pytest.approx(2)


def test_dl1_default_and_maximum() -> None:
    assert left_s() == 300
    clamped = read_deadline(CIMultiDict({"grpc-timeout": "2H"}), None, NOW, POLICY)
    assert clamped.at - NOW.mono == 1800
    assert clamped.clamped_ms == 1_800_000
    assert read_deadline(CIMultiDict(), None, NOW, POLICY).clamped_ms is None


@given(st.floats(0, 1e9), st.floats(-1e6, 1e6))
@settings(max_examples=20)
def test_dl2_the_same_moment_on_both_clocks(budget_ms: float, mono: float) -> None:
    """DL-2: what travels is the difference, so clocks need not agree."""
    arrival = Instant(mono, 1_800_000_000.0)
    deadline = read_deadline(CIMultiDict(), budget_ms, arrival, POLICY)
    expected = min(budget_ms, 1_800_000)
    assert deadline.left_ms(mono) == pytest.approx(expected, abs=1e-3)
    assert deadline.unix_ms == pytest.approx(1_800_000_000_000 + expected, abs=1)


# ── parts of an answer ───────────────────────────────────────────────────────────────────────────


def parts(
    *headers: tuple[str, str], first_token_ms: float | None = None, gap_ms: float | None = None
) -> Parts:
    return read_parts(CIMultiDict(headers), first_token_ms, gap_ms, NOW, [])


def test_dl14_every_spelling_of_a_part() -> None:
    assert parts() is NO_PARTS
    assert parts(first_token_ms=500) == Parts(50.5, math.inf, 50.5)
    assert parts(("x-first-token-timeout-ms", " 250.0 ")) == Parts(50.25, math.inf, 50.25)
    assert parts(("X-LLM-D-SLO-TTFT-MS", "500")) == Parts(50.5, math.inf, math.inf)
    assert parts(gap_ms=50) == Parts(math.inf, 0.05)
    assert parts(("x-llm-d-slo-tpot-ms", "0.5")) == Parts(math.inf, 0.0005)
    assert parts(("x-slo-ttft-ms", "500")) == Parts(50.5, math.inf, math.inf)
    assert parts(("x-slo-tpot-ms", "20, 10"), ("x-slo-tpot-ms", "0")) == Parts(math.inf, 0.01)


def test_dl14_the_smallest_wins_and_a_wish_does_not_cut() -> None:
    stated = parts(
        ("X-First-Token-Timeout-Ms", "3000"),
        ("X-First-Token-Timeout-Ms", "2000"),
        ("x-llm-d-slo-ttft-ms", "500"),
        ("x-llm-d-slo-tpot-ms", "20"),
        first_token_ms=4000,
        gap_ms=30,
    )
    assert stated == Parts(first_token_at=50.5, token_gap_s=0.02, cut_at=52.0)
    lax = parts(("x-llm-d-slo-ttft-ms", "5000"), first_token_ms=1000, gap_ms=30)
    assert lax == Parts(first_token_at=51.0, token_gap_s=0.03, cut_at=51.0)


@for_each("value", ["soon", "", "0", "-5", "5ms", "nan", "1e3", "inf"])
def test_dl14_a_part_that_is_no_use_is_an_error_that_names_the_header(value: str) -> None:
    header = "X-First-Token-Timeout-Ms"
    with pytest.raises(InvalidRequest, match=header) as caught:
        parts((header, value))
    assert caught.value.field == header


@for_each(
    ("value", "seconds"),
    [
        ("1500ms", 1.5),
        ("2s", 2),
        ("1m1.5s", 61.5),
        (" 250000us ", 0.25),
        ("250000µs", 0.25),
        ("+.5s", 0.5),
        ("0", math.inf),
    ],
)
def test_dl14_llm_ds_time_to_live_bounds_the_wait_for_the_first_token(
    value: str, seconds: float
) -> None:
    """It says nothing of the whole: what has begun continues."""
    stated = parts(("x-llm-d-inference-ttl", value))
    assert stated.cut_at - NOW.mono == pytest.approx(seconds)
    assert stated.first_token_at == stated.cut_at
    assert left_s(("x-llm-d-inference-ttl", value)) == 300


# ── what gateways and SDKs add by themselves ─────────────────────────────────────────────────────


_NO_DURATIONS = ["2 s", "s", "1d", "", "-1s", "-" + 99 * "999999999999999h"]
_NO_NUMBERS = ["soon", "", "-5", "5 ms", "nan", "1e3", "inf", "9" * 20, "٣٠"]


def test_dl20_what_others_add_and_cannot_be_read_refuses_nothing_and_is_named() -> None:
    for header, value in (
        *(("x-llm-d-inference-ttl", value) for value in ["2", *_NO_DURATIONS]),
        *(
            (header, value)
            for header in ("x-request-timeout", "request-timeout")
            for value in [*_NO_NUMBERS, *_NO_DURATIONS, "120000", "3600.5"]
        ),
        *(
            (header, value)
            for header in (
                "x-envoy-expected-rq-timeout-ms",
                "x-request-timeout-seconds",
                "x-litellm-timeout",
                "x-stainless-timeout",
                "x-stainless-read-timeout",
                "x-llm-d-slo-ttft-ms",
                "x-slo-tpot-ms",
            )
            for value in _NO_NUMBERS
        ),
    ):
        headers, ignored = CIMultiDict({header: value, "x-slo-ttft-ms": "0"}), list[str]()
        deadline = read_deadline(headers, None, NOW, POLICY, in_one_piece=True, ignored=ignored)
        assert (deadline.at, deadline.source) == (NOW.mono + 300, "default"), (header, value)
        assert read_parts(headers, None, None, NOW, ignored) is NO_PARTS, (header, value)
        assert [name.lower() for name in ignored] == [header], value


@for_each(
    ("stated", "seconds", "source"),
    [
        ({}, 300, "default"),
        ({"x-envoy-expected-rq-timeout-ms": "15000"}, 15, "x-envoy-expected-rq-timeout-ms"),
        ({"x-envoy-expected-rq-timeout-ms": "600000"}, 300, "default"),
        ({"x-envoy-expected-rq-timeout-ms": "0"}, 300, "default"),
        ({"x-envoy-expected-rq-timeout-ms": "15000,9000"}, 9, "x-envoy-expected-rq-timeout-ms"),
        ({"x-envoy-expected-rq-timeout-ms": "15000", "grpc-timeout": "5S"}, 5, "grpc-timeout"),
        ({"x-envoy-expected-rq-timeout-ms": "15000", "x-timeout-ms": "60000"}, 15, "x-envoy"),
        ({"x-stainless-read-timeout": "600"}, 300, "default"),
        ({"x-stainless-timeout": "20", "x-stainless-read-timeout": "7.5"}, 7.5, "x-stainless-read"),
        ({"x-stainless-timeout": "0", "X-Timeout-Ms": "1e"}, None, ""),
        ({"Request-Timeout": "9", "x-request-timeout": "8s"}, 8, "x-request-timeout"),
        ({"x-request-timeout": "900"}, 900, "x-request-timeout"),
        ({"X-Deadline": "1800000002000", "grpc-timeout": "3S"}, 2, "X-Deadline"),
    ],
)
def test_dl20_the_earliest_wins_is_named_and_nobody_on_the_way_makes_it_later(
    stated: dict[str, str], seconds: float | None, source: str
) -> None:
    if seconds is None:
        with pytest.raises(InvalidRequest):  # the client's own stay strict
            read_deadline(CIMultiDict(stated), None, NOW, POLICY, in_one_piece=True)
        return
    deadline = read_deadline(CIMultiDict(stated), None, NOW, POLICY, in_one_piece=True)
    assert deadline.at - NOW.mono == pytest.approx(seconds)
    assert deadline.source.startswith(source)


def test_dl20_bounds_count_where_somebody_waits() -> None:
    """Not for a task that continues by itself, nor an SDK's for a stream."""
    headers = CIMultiDict(
        {"x-envoy-expected-rq-timeout-ms": "15000", "x-stainless-read-timeout": "7"}
    )
    for options, seconds in (
        ({"in_one_piece": True}, 7),
        ({}, 15),
        ({"is_awaited": False, "in_one_piece": True}, 300),
    ):
        deadline = read_deadline(headers, None, NOW, POLICY, **options)
        assert deadline.at - NOW.mono == seconds
        assert deadline.is_default


def test_dl1_epoch_seconds_are_an_error_that_says_what_to_send() -> None:
    with pytest.raises(InvalidRequest, match=r"epoch seconds: send 1793674549500$"):
        read_deadline(CIMultiDict({"X-Deadline": "1793674549.5"}), None, NOW, POLICY)
    assert left_s(("X-Deadline", "5")) < 0  # as milliseconds, which it may be: long past
