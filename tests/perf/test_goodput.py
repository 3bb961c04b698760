"""The goodput benchmark's own parts: open loop, judgement (PF-2)."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from perf import SEED
from perf.goodput.__main__ import _COUNTED, Scene, _Contest, choices_of, new_arguments
from perf.goodput.load import LoadSource, at_once, drawn_load, source_of
from perf.goodput.policies import OURS
from perf.load import open_loop
from perf.load.drive import PATH
from perf.load.open_loop import NEVER_MS, Result, StreamRequest
from perf.load.outcomes import OfferedTurn
from perf.load.trace import CODE, Manner, TraceRow
from perf.load.workload import Speed
from perf.stack.scrape import Scrape
from tests.support.sites import running_app
from worker.runner.synthetic import length_ids

SPEED = Speed(prompt_token_ms=0.5, token_ms=10.0)
SCENE = Scene("conversation", Manner.CONSTANT)


def test_pf2_met_is_the_whole_answer_by_its_own_deadline() -> None:
    """DL-10: goodput, attainment, waste and refusals of one window."""
    ask = StreamRequest(0.0, 100.0, {})
    whole = {"status": 200, "complete": True, "finish": "stop"}
    measured = [
        (ask, Result(first_s=0.02, end_s=0.09, tokens=4, **whole)),  # type: ignore[arg-type]
        (ask, Result(first_s=0.04, end_s=0.11, tokens=4, **whole)),  # type: ignore[arg-type]
        (ask, Result(status=200, first_s=0.06, end_s=0.1, tokens=2, code="deadline_exceeded")),
        (ask, Result(status=504, end_s=0.01, code="deadline_infeasible")),
        (ask, Result(late_s=0.005)),
    ]
    samples = {
        ("tidegate_infeasible_samples_total", frozenset({("result", result)})): count
        for result, count in (("met", 1.0), ("lost", 3.0))
    }
    turn = OfferedTurn(measured, 0.5)
    assert turn.ends == {
        "met": 1,
        "late": 1,
        "deadline_exceeded after tokens": 1,
        "deadline_infeasible": 1,
        "unanswered": 1,
    }
    assert (turn.met_per_s, turn.attainment(), turn.waste, turn.refused) == (2.0, 0.2, 0.6, 0.2)
    worked = dict(zip(_COUNTED, (60.0, 30.0, 450.0, 900.0, 10.0, 290.0), strict=True))
    cell = SCENE.cell(OURS, 2.0, [turn], Scrape(samples), [worked | {"seconds": 3.0}])
    figures = {figure.key: figure for figure in cell.figures()}
    goodput = figures["conversation.constant.2x.ours.goodput_per_s"]
    assert goodput.low <= goodput.median == 2.0 <= goodput.high
    for name, value in (
        ("attainment", 0.2),
        ("waste", 0.6),
        ("ttft_p50_ms", 40.0),
        ("late_send_ms", 5.0),
        ("false_refusals", 0.25),
        ("end.deadline_infeasible", 0.2),
        ("prompts_per_s", 6.0),
        ("prompt_tokens_per_s", 300.0),
        ("rows", 2.0),
        ("decode_step_ms", 8.0),
        ("prompt_step_ms", 29.0),
    ):
        assert figures[f"conversation.constant.2x.ours.{name}"].median == pytest.approx(value)


def test_dl14_met_with_deadlines_for_parts_is_every_part_by_its_own() -> None:
    ask = StreamRequest(0.0, NEVER_MS, {}, first_token_ms=50.0, token_gap_ms=10.0)
    whole = Result(status=200, first_s=0.04, end_s=9.0, tokens=4, complete=True, finish="stop")
    late = Result(status=200, first_s=0.06, end_s=9.0, tokens=4, complete=True, finish="stop")
    late.missed = open_loop.FIRST_TOKEN
    turn = OfferedTurn([(ask, whole), (ask, late)], 1.0)
    assert turn.ends == {"met": 1, "first_token": 1} and turn.waste == 0.5
    assert [ask.due_ms(n, 40.0) for n in (1, 2, 5)] == [50.0, 60.0, 90.0]
    gaps = StreamRequest(0.0, NEVER_MS, {}, token_gap_ms=10.0)
    assert [gaps.due_ms(n, 40.0) for n in (1, 2, 5)] == [NEVER_MS, 50.0, 80.0]


TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,40
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:07.0319600,160,400
"""


def test_pf2_open_requests_state_one_cap_and_nothing_of_their_lengths(tmp_path: Path) -> None:
    """What the orchestrator may see is the same whatever the answer; known ones differ in it."""
    file = tmp_path / "azure-code.csv"
    file.write_text(TRACE)
    source = source_of(file)
    assert source.name == "code"
    load = drawn_load(source, SPEED, Manner.PROPORTIONAL, "m", 500, is_poisson=False)
    asks = load.asks(3.0, 10.0, 1)
    known = load.asks(3.0, 10.0, 1, knows_lengths=True)
    again, others = load.asks(3.0, 10.0, 1), load.asks(3.0, 10.0, 2)
    assert [(a.at_s, a.deadline_ms) for a in asks] == [(a.at_s, a.deadline_ms) for a in again]
    assert [a.deadline_ms for a in asks] != [a.deadline_ms for a in others]
    assert {ask.body["max_tokens"] for ask in asks} == {load.trace.cap_tokens}
    assert not any(ask.body["ignore_eos"] for ask in asks)
    lengths = [10, 2, 100]
    prompts = [ask.body["prompt"] for ask in asks]
    assert {tuple(prompt[-2:]) for prompt in prompts} == {*map(length_ids, lengths)}  # type: ignore[index]
    for mine, same in zip(asks, known, strict=True):
        assert (mine.at_s, mine.deadline_ms) == (same.at_s, same.deadline_ms)
        one, other = mine.body["prompt"], same.body["prompt"]
        assert isinstance(one, list) and isinstance(other, list)
        assert (one[-2:], len(one)) == (other[-2:], len(other))
        assert one[:-2] != other[:-2]  # no cache
        assert same.body["max_tokens"] in lengths and same.body["ignore_eos"]
    flood = at_once(load, 5, 1)
    assert [(ask.at_s, ask.deadline_ms) for ask in flood] == [(0.0, NEVER_MS)] * 5


async def test_pf2_policies_take_turns_in_windows_that_are_not_one_burst(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the trace has bursts only, the cells say so."""
    offered: list[Any] = []

    async def window(_: object, front: str, __: object) -> tuple[OfferedTurn, Scrape, Any]:
        offered.append(front)
        return OfferedTurn([], 1.0), Scrape({}), {"steps": 0.0}

    monkeypatch.setattr(_Contest, "_window", window)
    (file := tmp_path / "azure-code.csv").write_text(TRACE)
    names = ["ours", "no-prediction", "fifo-hang-up"]
    options = ["--model", "8b", "--trace", str(file), "--seconds", "1", "--policies", *names]
    choices = choices_of(new_arguments().parse_args(options))
    assert choices.size.turns == 3
    bursts = [TraceRow(60.0 * number, 9, 9) for number in range(9) for _ in range(100)]
    quiet = [TraceRow(540.0 + at, 9, 9) for at in range(900)]
    for rows, others in ((bursts + quiet, ""), (bursts, " (3 of 3 windows are one burst)")):
        source = LoadSource("code", rows, CODE)
        load = drawn_load(source, SPEED, Manner.CONSTANT, "m", 500, is_poisson=False)
        assert any(load.is_burst(10.0, 5.0, SEED + number) for number in range(9))
        fronts: Any = {name: name for name in names}
        cells = await _Contest(SCENE, load, choices, fronts, []).cells(2.0, 5.0)
        assert [cell.load for cell in cells] == ["conversation, constant, 2 ×" + others] * 3
        assert offered == [*names, *names[1:], names[0], names[2], *names[:2]]
        offered.clear()


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """A server that streams, refuses, breaks off or falls silent, as ``max_tokens`` says."""

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        kind = body["max_tokens"]  # the tokens of six have no text, as random ids
        text = b'data: {"choices":[{"text":"%s"}]}\n\n' % (b"" if kind == 6 else b"a")
        if kind == 1:
            assert request.headers["X-Timeout-Ms"] == "500.0"
            error = {"error": {"code": "deadline_infeasible", "message": "no"}}
            return web.json_response(error, status=504)
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(kind):
            await response.write(text)
            await asyncio.sleep(0.001)
        if kind == 2:
            await response.write(b'data: {"error":{"code":"deadline_exceeded"}}\n\n')
            return response
        if kind == 3:
            await asyncio.Event().wait()
        usage = b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\n' % kind
        await response.write(text + usage + b"data: [DONE]\n\n")
        return response

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text="# TYPE a gauge\na 1\n")

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/metrics", metrics)
    async with running_app(app) as port:
        yield port


async def test_pf2_the_open_loop_tells_every_kind_of_end_apart(port: int) -> None:
    asks = [
        open_loop.StreamRequest(0.01 * i, 500.0, {"max_tokens": kind})
        for i, kind in enumerate((1, 2, 3, 5, 6))
    ]
    results = await open_loop.run(open_loop.OpenLoopPlan("127.0.0.1", port, PATH, asks, True, 0.5))
    refused, broken, silent, *whole = results
    assert (refused.status, refused.code, refused.tokens) == (504, "deadline_infeasible", 0)
    assert (broken.status, broken.code, broken.tokens) == (200, "deadline_exceeded", 2)
    assert not broken.complete and broken.first_s < broken.end_s
    assert (silent.status, silent.end_s, silent.tokens, silent.complete) == (200, 0.0, 3, False)
    assert [(each.tokens, each.complete, each.code) for each in whole] == [
        (5, True, ""),
        (6, True, ""),
    ]
    assert all(each.first_s < each.end_s for each in whole)


async def test_pf2_clients_hang_up_at_their_own_deadlines(port: int) -> None:
    """At once, so that the service may stop; who has a first token waits for the rest."""
    body: dict[str, object] = {"max_tokens": 3}  # three tokens, then silence
    asks = [
        StreamRequest(0.0, 700.0, body),
        StreamRequest(0.0, 60_000.0, body, first_token_ms=700.0),
        StreamRequest(0.0, 700.0, {"max_tokens": 5}),
        StreamRequest(0.0, NEVER_MS, body),
    ]
    plan = open_loop.OpenLoopPlan("127.0.0.1", port, PATH, asks, False, 1.0, hang_up=True)
    whole, first, met, patient = await open_loop.run(plan)
    assert (whole.code, whole.tokens, whole.complete) == (open_loop.HUNG_UP, 3, False)
    assert (first.code, patient.code) == ("", "")  # they waited to the end
    assert met.complete and not met.code


async def test_dl14_a_token_behind_its_schedule_is_a_missed_part(port: int) -> None:
    """Tokens come 1 ms apart, so the sixth of a stream is late where all are due at once."""
    six: dict[str, object] = {"max_tokens": 6}
    asks = [
        StreamRequest(0.0, NEVER_MS, six, first_token_ms=2_000.0, token_gap_ms=1_000.0),
        StreamRequest(0.1, NEVER_MS, six, token_gap_ms=0.001),
        StreamRequest(0.2, NEVER_MS, six, first_token_ms=0.001),
    ]
    plan = open_loop.OpenLoopPlan("127.0.0.1", port, PATH, asks, False, 0.5)
    kept, gap, first = await open_loop.run(plan)
    assert (kept.missed, gap.missed, first.missed) == (
        "",
        open_loop.TOKEN_GAP,
        open_loop.FIRST_TOKEN,
    )
    assert kept.complete and gap.complete and first.complete
