"""``perf/engine/gpu.py`` on toy sizes without a GPU: its logic, not its figures."""

import subprocess
from pathlib import Path

import pytest

from perf.engine import gpu
from perf.report.bundle import read


@pytest.mark.slow
@pytest.mark.timeout(600)  # much work on a slow machine
def test_every_section_runs_without_a_gpu(tmp_path: Path) -> None:
    """PF-6: a bundle that says on what."""
    file = tmp_path / "bundle.json"
    profile = tmp_path / "profile.txt"
    arguments = ["--device", "cpu", "--shape", "tiny", "--json", str(file), "--allow-dirty"]
    assert gpu.main([*arguments, "--profile", str(profile)]) == 0
    bundle = read(file)
    assert [one.name for one in bundle.results] == list(gpu.SECTIONS)
    assert not any(one.failed for one in bundle.results)
    figures = bundle.figures()
    assert figures["engine.prefill.tokens_per_s"].median > 0
    assert (
        figures["steps.16.2.prompt_launch"].n > 2 and figures["steps.16.0.prompts.tokens_per_s"].n
    )
    assert "matmul" in profile.read_text() or "aten::" in profile.read_text()
    assert bundle.versions["torch"] and bundle.commit and bundle.engine_digest


def test_the_plan_for_a_lent_gpu_says_its_three_calls() -> None:
    """Without one of them it runs nothing; each was rehearsed on a tiny shape (docs/gpu.md)."""
    run = subprocess.run(["bash", "perf/lease.sh"], capture_output=True, text=True)
    assert run.returncode == 2 and not run.stderr
    for call in ("pack", "engine", "code", "conversation"):
        assert f"perf/lease.sh {call} " in run.stdout
