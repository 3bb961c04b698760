"""The goodput benchmark's own parts: workload, open loop, judgement, plot (PF-2)."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from perf import goodput_plot, openloop
from perf.goodput_cell import Cell, cell_of
from perf.goodput_policies import OURS, POLICIES
from perf.load import PATH
from perf.metrics import Scrape, scrape
from perf.openloop import Result
from perf.workload import Arrival, Speed, Workload

WORKLOAD = Workload(Speed(prompt_token_ms=0.5, token_ms=10.0), vocab_size=500)


def test_pf2_a_seed_makes_the_same_requests_every_time() -> None:
    first, second = (WORKLOAD.arrivals(per_s=50.0, seconds=20.0, seed=3) for _ in range(2))
    assert first == second != WORKLOAD.arrivals(per_s=50.0, seconds=20.0, seed=4)
    assert 850 < len(first) < 1150
    assert all(a.at_s < b.at_s for a, b in itertools.pairwise(first))
    for arrival in first:
        alone_ms = WORKLOAD.speed.service_ms(len(arrival.prompt), arrival.max_tokens)
        assert arrival.deadline_ms >= 1.5 * alone_ms
        assert 8 <= len(arrival.prompt) <= 256 and max(arrival.prompt) < 500
    assert len({arrival.max_tokens for arrival in first}) > 20


def test_pf2_met_is_the_whole_answer_by_its_own_deadline() -> None:
    """DL-10: goodput, attainment, waste and refusals of one window."""
    arrival = Arrival(0.0, [1], 4, deadline_ms=100.0)
    measured = [
        (arrival, Result(status=200, first_s=0.02, end_s=0.09, tokens=4, complete=True)),
        (arrival, Result(status=200, first_s=0.04, end_s=0.11, tokens=4, complete=True)),
        (arrival, Result(status=200, first_s=0.06, end_s=0.1, tokens=2, code="deadline_exceeded")),
        (arrival, Result(status=504, end_s=0.01, code="deadline_infeasible")),
        (arrival, Result(late_s=0.005)),
    ]
    samples = {
        ("tidegate_infeasible_samples_total", frozenset({("result", result)})): count
        for result, count in (("met", 1.0), ("lost", 3.0))
    }
    cell = cell_of(OURS, 2.0, 0.5, measured, Scrape(samples))
    assert (cell.sampled, cell.sampled_met) == (4, 1)
    assert cell.ends == {
        "met": 1,
        "late": 1,
        "deadline_exceeded after tokens": 1,
        "deadline_infeasible": 1,
        "unanswered": 1,
    }
    assert (cell.offered, cell.met, cell.refused) == (5, 1, 1)
    assert (cell.goodput, cell.attainment, cell.waste) == (2.0, 0.2, 0.6)
    assert cell.goodput_low <= cell.goodput <= cell.goodput_high
    assert cell.ttft(50) == 40.0 and cell.late_send_ms == 5.0
    keys = {figure.key for figure in cell.figures()}
    assert {"ours.2x.goodput_per_s", "ours.2x.waste", "ours.2x.ttft_p99_ms"} <= keys


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """A server that streams, refuses, breaks off or falls silent, as ``max_tokens`` says."""

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        kind, text = body["max_tokens"], b'data: {"choices":[{"text":"a"}]}\n\n'
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
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


async def test_pf2_the_open_loop_tells_every_kind_of_end_apart(port: int) -> None:
    asks = [
        openloop.Ask(0.01 * i, 500.0, {"max_tokens": kind})
        for i, kind in enumerate((1, 2, 3, 5, 6))
    ]
    results = await openloop.run(openloop.Plan("127.0.0.1", port, PATH, asks, True, 0.5))
    refused, broken, silent, *whole = results
    assert (refused.status, refused.code, refused.tokens) == (504, "deadline_infeasible", 0)
    assert (broken.status, broken.code, broken.tokens) == (200, "deadline_exceeded", 2)
    assert not broken.complete and broken.first_s < broken.end_s
    assert (silent.status, silent.end_s, silent.tokens, silent.complete) == (200, 0.0, 3, False)
    assert [(each.tokens, each.complete, each.code) for each in whole] == [
        (5, True, ""),
        (6, True, ""),
    ]


async def test_the_service_s_own_counts_are_read(port: int) -> None:
    assert (await scrape("127.0.0.1", port)).total("a") == 1.0


def test_what_was_counted_in_between() -> None:
    key = ("x_total", frozenset({("outcome", "met")}))
    told = Scrape.between(Scrape({key: 2.0}), Scrape({key: 5.0, ("y", frozenset()): 1.0}))
    assert told.total("x_total", outcome="met") == 3.0 and told.total("x_total") == 3.0
    assert told.total("x_total", outcome="failed") == 0.0


def test_pf2_the_plot_has_every_policy(tmp_path: Path) -> None:
    def cell(policy: str, label: str, load: float) -> Cell:
        return Cell(
            policy=policy,
            label=label,
            load=load,
            offered=10,
            met=5,
            refused=0,
            goodput=5.0,
            goodput_low=4.0,
            goodput_high=6.0,
            tokens=100,
            wasted=1,
            ttft_ms=[20.0, 30.0],
            sampled=4,
            sampled_met=1,
            late_send_ms=0.0,
            ends={"met": 5, "unanswered": 5},
        )

    cells = [cell(p.name, p.label, load) for p in POLICIES for load in (1.0, 2.0)]
    png, svg = goodput_plot.draw(cells, 20.0, tmp_path / "plot")
    assert png.read_bytes().startswith(b"\x89PNG")
    text = svg.read_text()
    for policy in POLICIES:
        assert policy.label in text


def test_a_quantile_of_a_histogram_is_interpolated() -> None:
    """As Prometheus does: evenly within a bucket, the last finite edge beyond it."""

    def bucket(edge: str) -> tuple[str, frozenset[tuple[str, str]]]:
        return "h_bucket", frozenset({("le", edge)})

    told = Scrape({bucket("1.0"): 50.0, bucket("2.0"): 90.0, bucket("+Inf"): 100.0})
    assert told.quantile("h", 0.5) == 1.0
    assert told.quantile("h", 0.7) == 1.5
    assert told.quantile("h", 0.99) == 2.0
    with pytest.raises(ValueError, match="nothing"):
        told.quantile("other", 0.5)
