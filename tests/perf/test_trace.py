"""Loads made of traces: what a file must have, how requests are scaled, when they come."""

import math
from pathlib import Path

import pytest

from perf.load.trace import Application, Manner, TraceError, TraceLoad, TraceRow, read_trace
from perf.load.workload import Speed
from tests.support.cases import for_each

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
SPEED = Speed(1.0, 10.0)
ONE = (Application("one", 1.0, 8000.0, 2000.0, 100.0),)


def written(path: Path, text: str) -> Path:
    file = path / "trace.csv"
    file.write_text(text)
    return file


def test_columns_are_found_by_name_and_requests_put_in_order(tmp_path: Path) -> None:
    text = (
        "Extra,GeneratedTokens,TIMESTAMP,ContextTokens\n"
        "x,40,2023-11-16 18:15:48.1234567,640\n"
        "x,7,2023-11-16 18:15:46.6234567,16\n"
        "x,0,2023-11-16 18:15:50.0000000,16\n"
    )
    first, second = read_trace(written(tmp_path, text))
    assert first == TraceRow(0.0, 16, 7)
    assert second[1:] == (640, 40)
    assert second.at_s == pytest.approx(1.5, abs=1e-4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("TIMESTAMP,ContextTokens\n", "no column GeneratedTokens"),
        (HEAD + "2023-11-16 18:15:46,16,7\nyesterday,16,7\n", "line 3"),
        (HEAD + "2023-11-16 18:15:46,16\n", "line 2"),
        (HEAD + "2023-11-16 18:15:46,16,7\n", "no requests"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(TraceError) as error:
        read_trace(file)
    assert str(file) in str(error.value)
    assert says in str(error.value)


def load(**changes: object) -> TraceLoad:
    """Eight requests at 0, 1, … 7 s and one after a pause."""
    rows = [TraceRow(float(at), 160 * (1 + at % 3), 40 * (1 + at % 4)) for at in (*range(8), 20)]
    return TraceLoad(rows, SPEED, applications=ONE, **changes)  # type: ignore[arg-type]


def test_tokens_are_scaled_and_every_request_states_one_cap() -> None:
    made = load()
    requests = list(made.requests(1.0, 9.0, 1))
    assert {r.prompt_tokens for r in requests} == {10, 20, 30}
    assert {r.answer_tokens for r in requests} == {10, 20, 30, 40}
    assert made.cap_tokens == 51


@for_each("is_poisson", [False, True])
def test_requests_come_at_their_rate_in_order_and_repeat(is_poisson: bool) -> None:
    made = load(is_poisson=is_poisson)
    requests = list(made.requests(5.0, 20.0, 3))
    assert len(requests) == 100
    times = [request.at_s for request in requests]
    assert times == sorted(times)
    assert times[0] >= 0 and times[-1] <= 20.0
    assert requests == list(made.requests(5.0, 20.0, 3))
    assert requests != list(made.requests(5.0, 20.0, 4))


@for_each("manner", Manner)
def test_deadlines_are_as_clients_choose_them(manner: Manner) -> None:
    for request in load(manner=manner).requests(2.0, 30.0, 5):
        parts = (request.first_token_ms, request.token_gap_ms)
        match manner:
            case Manner.PROPORTIONAL:
                own = SPEED.service_ms(request.prompt_tokens, request.answer_tokens)
                patience = (request.deadline_ms - 250.0) / own
                assert round(patience, 6) in (1.5, 3.0, 6.0)
                assert parts == (math.inf, math.inf)
            case Manner.CONSTANT:
                assert request.deadline_ms == 8000.0 / 4
                assert parts == (math.inf, math.inf)
            case Manner.PARTS:
                assert request.deadline_ms == math.inf
                assert parts == (500.0, 25.0)
