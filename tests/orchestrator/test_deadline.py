"""DL-1, DL-2, DL-3: every spelling of a deadline, and what cannot be read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from orchestrator.clock import Instant
from orchestrator.deadline import Deadline, DeadlinePolicy, read_deadline
from orchestrator.errors import DeadlineExceeded, InvalidRequest

NOW = Instant(mono=50.0, unix=1_800_000_000.0)
POLICY = DeadlinePolicy(default_s=300, max_s=1800)


def left_s(*headers: tuple[str, str], body_ms: float | None = None) -> float:
    return read_deadline(CIMultiDict(headers), body_ms, NOW, POLICY).at - NOW.mono


@pytest.mark.parametrize(
    ("header", "value", "seconds"),
    [
        ("X-Deadline", "2027-01-15T08:00:02Z", 2),
        ("X-Deadline", "2027-01-15t08:00:02.5z", 2.5),
        ("X-Deadline", "2027-01-15T09:30:02+01:30", 2),
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
        ("X-Deadline", "2020-01-01T00:00:00Z", 1577836800 - 1_800_000_000),
    ],
)
def test_dl1_every_spelling(header: str, value: str, seconds: float) -> None:
    assert left_s((header, value)) == pytest.approx(seconds, abs=1e-6)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("X-Deadline", "tomorrow"),
        ("X-Deadline", ""),
        ("X-Deadline", "2027-01-15T08:00:02"),
        ("X-Deadline", "2027-13-15T08:00:02Z"),
        ("X-Deadline", "2027-01-15"),
        ("X-Deadline", "nan"),
        ("X-Deadline", "1e3"),
        ("X-Deadline", "٢٠٢٧"),
        ("grpc-timeout", "5"),
        ("grpc-timeout", "123456789S"),
        ("grpc-timeout", "-1S"),
        ("grpc-timeout", "1.5S"),
        ("X-Timeout-Ms", "-"),
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


def test_dl1_default_and_maximum() -> None:
    assert left_s() == 300
    clamped = read_deadline(CIMultiDict({"grpc-timeout": "2H"}), None, NOW, POLICY)
    assert clamped.at - NOW.mono == 1800
    assert clamped.clamped_ms == 1_800_000
    assert read_deadline(CIMultiDict(), None, NOW, POLICY).clamped_ms is None


@given(st.floats(0, 1e9), st.floats(-1e6, 1e6))
def test_dl2_the_same_moment_on_both_clocks(budget_ms: float, mono: float) -> None:
    """DL-2: what travels is the difference, so clocks need not agree."""
    arrival = Instant(mono, 1_800_000_000.0)
    deadline = read_deadline(CIMultiDict(), budget_ms, arrival, POLICY)
    expected = min(budget_ms, 1_800_000)
    assert deadline.left_ms(mono) == pytest.approx(expected, abs=1e-3)
    assert deadline.unix_ms == pytest.approx(1_800_000_000_000 + expected, abs=1)


def test_dl3_the_floor() -> None:
    deadline = Deadline(at=10.0, unix_ms=0)
    deadline.require(10, now=9.98)
    for now in (9.99, 9.995, 10.0, 12.0):
        with pytest.raises(DeadlineExceeded) as caught:
            deadline.require(10, now=now)
        headers = caught.value.headers()
        assert headers["x-should-retry"] == "false"
        assert float(headers["X-Deadline-Exceeded-By-Ms"]) == pytest.approx(
            max(0.0, (now - 10.0) * 1000), abs=1e-3
        )
