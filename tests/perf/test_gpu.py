"""``perf/engine/gpu.py`` on toy sizes without a GPU: its logic, not its figures."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from catalog.paths import state_dir
from perf.engine import gpu
from perf.report.bundle import read
from pool.engines.triton_wheel import is_prepared, wheel_dir


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
    counts = {"launch_p90": 6, "first_launch": 1, "launch": 6, "retries": 6}
    assert all(figures[f"steps.16.2.prompt_{name}"].n >= n for name, n in counts.items())
    assert figures["steps.16.0.prompts.tokens_per_s"].n
    assert "matmul" in profile.read_text() or "aten::" in profile.read_text()
    assert bundle.versions["torch"] and bundle.commit and bundle.engine_digest


def test_the_plan_for_a_lent_gpu_says_its_three_calls() -> None:
    """Without one of them it runs nothing; their parts' limits leave room for a start."""
    run = subprocess.run(["bash", "perf/lease.sh"], capture_output=True, text=True)
    assert run.returncode == 2 and not run.stderr
    for call in ("pack", "engine", "code", "conversation"):
        assert f"perf/lease.sh {call} " in run.stdout
    script = Path("perf/lease.sh").read_text()
    limits = re.findall(r"(?:part|goodput) [a-z-]+ [^\d\n]*(\d+)", script)
    assert len(limits) == 8 and sum(map(int, limits)) <= 730 and " 730. 110 are" in run.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_calls_of_a_lease_run_on_a_tiny_shape_without_a_gpu(tmp_path: Path) -> None:
    """``engine``, and ``code`` in one turn on short requests. Left out: ``conversation``, which is
    as ``code`` with other arguments, ``pack``, and unpacking its files."""
    if not is_prepared(state_dir()):
        pytest.skip("no Triton server from the wheel: make setup")
    wheel_dir(home := tmp_path / "work/home").parent.mkdir(parents=True)
    wheel_dir(home).symlink_to(wheel_dir(state_dir()))
    (tmp_path / "work/unpacked").touch()
    rows = [f"2023-11-16 18:{at // 60:02}:{at % 60:02},400,200" for at in range(900)]
    trace = "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows])
    (tmp_path / "azure-llm-2023-code.csv").write_text(trace)
    env = os.environ | {"SHAPE": "tiny", "DEVICE": "cpu", "WINDOW": "2", "TURNS": "1"}
    env |= {"WORK": f"{tmp_path}/work", "OUT": f"{tmp_path}/out", "TRACES": str(tmp_path)}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    calls = "perf/lease.sh engine; perf/lease.sh code"
    said = subprocess.run(calls, shell=True, env=env, capture_output=True, text=True).stdout
    ended = dict(re.findall(r"^([a-z-]+): exit status (\d+)", said, re.M))
    assert set(ended.values()) == {"0"} and len(ended) == 6, said[-3000:]
