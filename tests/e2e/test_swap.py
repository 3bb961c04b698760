"""Models swapped on the real Triton, under load: nothing is dropped, nothing is late (WK-7)."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from catalog.paths import DEMO_CHECKPOINT
from tests.e2e.test_pool import BODY, Load
from tests.support.checkpoints import edit_config
from tests.support.stack import DOWN_AFTER_S, Orchestrator, Triton, asked, running, started

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TORCH = ("--set", "ENGINE=torch")
LIMIT = {"deadline_ms": 20_000}


@dataclass
class Pair:
    """Two Tritons with made-up tokens behind one orchestrator, and folders to swap to: load that
    costs no CPU, and one real model."""

    tritons: tuple[Triton, ...]
    orchestrator: Orchestrator
    other: Path

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
    other = folder / "other"
    shutil.copytree(DEMO_CHECKPOINT, other)
    edit_config(other, rope_theta=20_000.0)  # other texts, and another digest
    models = json.dumps({"other": str(other)})
    tritons = tuple(Triton(engine="synthetic-paced", models=models) for _ in range(2))
    # No silence of a busy machine is to be taken for an instance that is gone.
    orchestrator = Orchestrator(*(one.grpc for one in tritons), **{DOWN_AFTER_S: 60})
    with started(*tritons), running(orchestrator):
        yield Pair(tritons, orchestrator, other)


def test_wk7_two_instances_change_their_model_under_load_and_no_stream_is_dropped(
    pair: Pair,
) -> None:
    """Blue/green: the first, and the second once the first is ready."""
    load = Load(pair.orchestrator.url, **LIMIT)
    try:
        load.goes_on()
        done = [pair.command(one.grpc, str(pair.other), "--name", "demo") for one in pair.tritons]
        load.goes_on()
    finally:
        load.end()
    for one, swap in zip(pair.tritons, done, strict=True):
        assert swap.returncode == 0, swap.stderr
        what, _, took = swap.stdout.partition(" after ")
        assert what == f"{one.grpc} serves demo"
        assert float(took.split(" s")[0]) < 30, "WK-7's bound"
    assert load.failed == []
    assert pair.orchestrator.metric("tidegate_model_swaps_total", result="done") == 2
    met = pair.orchestrator.metric("tidegate_outcomes_total", outcome="met")
    assert met == len(load.texts)


def test_wk7_an_instance_goes_on_with_another_engine(pair: Pair) -> None:
    done = pair.command(pair.tritons[0].grpc, str(pair.other), "--name", "demo", *TORCH)
    assert done.returncode == 0, done.stderr
    url = pair.orchestrator.url
    instances = json.loads(asked(f"{url}/v2/instances")[1])["instances"]
    assert {one["engine"] for one in instances} == {"torch", "synthetic-paced"}
    for _ in range(4):  # both take their turns
        status, told = asked(f"{url}/v1/completions", BODY | LIMIT)
        assert status == 200, told
