"""The engine's benchmark on a model of no size: every part gives its figures, and sound ones."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from perf.engine import __main__ as bench_engine
from perf.engine import bandwidth
from perf.engine.checkpoints import SHAPES, ModelShape, make_checkpoint, write_config
from perf.engine.parts import PARTS
from perf.engine.rig import EngineRig
from perf.report.bundle import read
from worker.models.config import read_config
from worker.models.model import load_model, parameter_count

pytestmark = pytest.mark.slow

KEYS = {
    "decode": ["bandwidth.gb_per_s", "decode.b1.ratio", "decode.b8.bandwidth_share"],
    "prefill": ["prefill.tokens_per_s"],
    "mixed": ["mixed.ttft_ms", "mixed.gap_before_ms", "mixed.gap_worst_ms"],
    "prefix": ["prefix.cold_ms", "prefix.hit_ms"],
    "resume": ["resume.recompute_ms", "resume.disk_ms", "resume.tokens"],
    "load": ["load.cold.model_load_ms", "load.hot.cpu_init_ms", "load.hot.total_ms"],
}


@pytest.fixture(autouse=True)
def one_thread_and_little_memory(monkeypatch: pytest.MonkeyPatch) -> object:
    """The figures mean nothing here, however far beyond the caches the memory is."""
    monkeypatch.setattr(bandwidth, "_CPU_BYTES", 2**20)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_part_gives_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PF-1, PF-6. All parts on one engine, as they run."""
    monkeypatch.setattr(bench_engine, "_QUICK", replace(bench_engine._QUICK, repeats=1))
    file = tmp_path / "bundle.json"
    command = ["--quick", "--shape", "tiny", "--json", str(file), "--allow-dirty"]
    assert bench_engine.main([*command, "--scratch", str(tmp_path)]) == 0
    bundle = read(file)
    assert [result.name for result in bundle.results] == list(KEYS)
    assert not [result for result in bundle.results if result.failed or result.skipped]
    for result in bundle.results:
        assert set(KEYS[result.name]) <= {figure.key for figure in result.figures}
    assert all(figure.low >= 0 for figure in bundle.figures().values())
    assert bundle.model == "random-tiny"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle.json"], "scratch was left behind"


def test_a_part_that_fails_is_a_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "bundle.json"
    monkeypatch.setitem(PARTS, "prefill", lambda bench: 1 / 0)
    command = [
        "--quick",
        "--shape",
        "tiny",
        "--only",
        "prefill",
        "--json",
        str(file),
        "--allow-dirty",
    ]
    assert bench_engine.main(command) == 1
    assert read(file).results[0].failed.startswith("ZeroDivisionError")


@pytest.mark.parametrize(
    ("name", "millions"), [("0.5b", 494), ("1.5b", 1544), ("8b", 8030 - 525)], ids=str
)
def test_shapes_are_those_of_the_models(name: str, millions: int, tmp_path: Path) -> None:
    """Of Llama's 8030 million parameters 525 are the table, which a step does not read."""
    write_config(tmp_path, SHAPES[name])
    assert round(parameter_count(read_config(tmp_path)) / 1e6) == millions


def test_a_made_checkpoint_loads(tmp_path: Path) -> None:
    shape = SHAPES["tiny"]
    make_checkpoint(tmp_path, shape, 1)
    assert shape == ModelShape.of(tmp_path)
    config = read_config(tmp_path)
    model = load_model(tmp_path, config, torch.bfloat16, torch.device("cpu"))
    # Norms, a hundredth of these, may be float32 beside weights of bfloat16.
    assert 2 * 0.9 < model.step_bytes / parameter_count(config) < 2 * 1.01
    assert sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) > shape.file_bytes


def test_the_rig_gives_what_was_asked_for(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, SHAPES["tiny"], 1)
    with EngineRig(tmp_path, "cpu") as rig:
        run = rig.ask(rig.prompts.draw(20), 7)
        assert len(run.ids) == len(run.token_times) == 7
        assert run.ttft_s > 0
        assert len(run.gaps_s) == 6
        with pytest.raises(RuntimeError, match="a job ended with"):
            rig.ask([], 1)
