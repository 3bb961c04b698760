"""Models swapped on the real Triton, under load: nothing is dropped, nothing is late (WK-7)."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from catalog.paths import DEMO_CHECKPOINT
from tests.support.checkpoints import edit_config
from tests.support.stack import DOWN_AFTER_S, Orchestrator, Triton

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CLIENTS = 4
TORCH = ("--set", "ENGINE=torch")
BODY = {"prompt": "Once upon", "max_tokens": 32, "ignore_eos": True, "stream": True}
HEADERS = {"X-Timeout-Ms": "20000"}


@dataclass
class Pair:
    """Two Tritons with made-up tokens behind one orchestrator, and folders to swap to: load that
    costs no CPU, and one real model."""

    tritons: tuple[Triton, ...]
    orchestrator: Orchestrator
    other: Path
    broken: Path

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """``tidegate swap``."""
        return subprocess.run(
            [sys.executable, "-m", "tidegate", "swap", *words, "--url", self.orchestrator.url],
            capture_output=True,
            text=True,
            timeout=200,
        )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("models")
    other, broken = folder / "other", folder / "broken"
    for path in (other, broken):
        shutil.copytree(DEMO_CHECKPOINT, path)
    edit_config(other, rope_theta=20_000.0)  # other texts, and another digest
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    models = json.dumps({"other": str(other)})
    tritons = tuple(Triton(engine="synthetic-paced", models=models) for _ in range(2))
    # No silence of a busy machine is to be taken for an instance that is gone.
    orchestrator = Orchestrator(*(one.grpc for one in tritons), **{DOWN_AFTER_S: 60})
    try:
        for triton in tritons:
            triton.start()
        orchestrator.start()
        yield Pair(tritons, orchestrator, other, broken)
        assert orchestrator.stop() == 0
    finally:
        for triton in tritons:
            triton.close()


@dataclass
class Load:
    """Clients that ask one after the other, until told to stop."""

    texts: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    is_over: bool = False
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def more(self, count: int) -> None:
        """Wait for so many further streams to have ended, or for a fault."""
        wanted = len(self.texts) + count
        async with self.changed:
            await self.changed.wait_for(lambda: self.faults or len(self.texts) >= wanted)


@asynccontextmanager
async def load(url: str, model: str) -> AsyncIterator[Load]:
    """``CLIENTS`` streams at a time, each to its end."""
    state = Load()

    async def client(http: aiohttp.ClientSession) -> None:
        while not state.is_over:
            body = BODY | {"model": model}
            async with http.post("/v1/completions", json=body, headers=HEADERS) as response:
                text = await response.text()
            if response.status == 200 and '"finish_reason":"length"' in text.replace(" ", ""):
                state.texts.append(text)
            else:
                state.faults.append(f"{response.status}: {text[-300:]}")
            async with state.changed:
                state.changed.notify_all()

    async with aiohttp.ClientSession(url) as http:
        clients = [asyncio.create_task(client(http)) for _ in range(CLIENTS)]
        try:
            yield state
        finally:
            state.is_over = True
            await asyncio.gather(*clients)


async def test_wk7_two_instances_change_their_model_under_load_and_no_stream_is_dropped(
    pair: Pair,
) -> None:
    """Blue/green: the first, and the second once the first is ready."""
    async with load(pair.orchestrator.url, "demo") as state:
        await state.more(CLIENTS)
        words = ("--all", str(pair.other), "--name", "demo")
        done = await asyncio.to_thread(pair.command, *words)
        await state.more(2 * CLIENTS)
    assert done.returncode == 0, done.stderr
    told = [line.split(" after ") for line in done.stdout.splitlines()]
    assert [what for what, _ in told] == [f"{one.grpc} serves demo" for one in pair.tritons]
    assert all(float(took.split(" s")[0]) < 30 for _, took in told), "WK-7's bound"
    assert state.faults == []
    assert pair.orchestrator.metric("tidegate_model_swaps_total", result="done") == 2
    met = pair.orchestrator.metric("tidegate_outcomes_total", outcome="met")
    assert met == len(state.texts) > 3 * CLIENTS


async def test_wk7_an_instance_goes_on_with_another_engine(pair: Pair) -> None:
    address, words = pair.tritons[0].grpc, (str(pair.other), "--name", "demo", *TORCH)
    done = await asyncio.to_thread(pair.command, address, *words)
    assert done.returncode == 0, done.stderr
    async with aiohttp.ClientSession(pair.orchestrator.url) as http:
        async with http.get("/v2/instances") as response:
            engines = {one["engine"] for one in (await response.json())["instances"]}
        assert engines == {"torch", "synthetic-paced"}
        for _ in range(4):  # both take their turns
            body = BODY | {"model": "demo", "stream": False}
            async with http.post("/v1/completions", json=body, headers=HEADERS) as response:
                assert response.status == 200, await response.text()
