"""``perf/engine/gpu.py`` on toy sizes without a GPU: its logic, not its figures."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from perf.engine import bare_engine, gpu, gpu_parts
from perf.report.rows import Report, read_rows
from tests.worker.runner.test_cuda_runner import CallAgain, RefilledReference
from worker.attention.choice import Choice


@pytest.fixture
def one_child(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only one section gets a process of its own: each imports torch for seconds."""
    started, threads = subprocess.run, torch.get_num_threads()

    def start(command: list[str], **rest: object) -> object:
        if "--section" not in command or "loader" in command:
            return started(command, **rest)  # type: ignore[call-overload]
        return subprocess.CompletedProcess(command, gpu.main(command[3:]))

    monkeypatch.setattr(gpu.subprocess, "run", start)
    monkeypatch.setattr(gpu, "SECTIONS", dict.fromkeys(gpu.SECTIONS, 600.0))
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.timeout(600)  # much work on a slow machine, and torch is imported twice
@pytest.mark.usefixtures("one_child")
def test_every_section_runs_without_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PF-6: a table, and a bundle that says on what."""
    bundle_file = tmp_path / "bundle.json"
    arguments = ["--device", "cpu", "--shape", "tiny", "--json", str(bundle_file), "--allow-dirty"]
    assert gpu.main([*arguments, "--budget-s", "6000"]) == 0
    bundle = json.loads(bundle_file.read_text())
    rows = {(row["section"], row["what"]): row for row in bundle["rows"]}
    assert not [row for row in bundle["rows"] if row["value"] == "FAILED"]
    assert {section for section, _ in rows} == set(gpu.SECTIONS)
    assert rows["engine", "prefill"]["value"] > 0
    assert rows["resume", "conversation computed: first token"]["note"].startswith("0 of ")
    assert not rows["resume", "conversation from disk: first token"]["note"].startswith("0 of ")
    assert bundle["complete"] and bundle["versions"]["torch"] and bundle["commit"]
    assert "prefill" in capsys.readouterr().out


def test_a_section_without_time_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--device", "cpu", "--shape", "tiny", "--scratch", str(tmp_path)]
    assert gpu.main([*arguments, "--budget-s", "3"]) == 1
    assert capsys.readouterr().out.count("no time left") >= len(gpu.SECTIONS)


def test_a_section_whose_process_dies_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import json, os, sys\n"
        "rows = sys.argv[sys.argv.index('--rows') + 1]\n"
        "with open(rows, 'w') as out:\n"
        "    row = dict(section='loader', what='one', value=1.0, unit='', note='')\n"
        "    out.write(json.dumps(row) + '\\n')\n"
        "os._exit(7)\n"
    )
    started = subprocess.run

    def start(command: list[str], **rest: object) -> object:
        return started([command[0], str(broken), *command[3:]], **rest)  # type: ignore[call-overload]

    monkeypatch.setattr(gpu.subprocess, "run", start)
    options = gpu._parser().parse_args(["--device", "cpu", "--shape", "tiny"])
    rows, whole = gpu._section_in_child("loader", options, tmp_path, 60.0)
    assert not whole
    assert [row.what for row in rows] == ["one", "section"]
    assert "ended with 7" in rows[-1].note


def test_a_part_that_fails_does_not_end_its_section(tmp_path: Path) -> None:
    report = Report("loader", tmp_path / "rows", ends_at=1e18)
    report.attempt("broken", lambda: [][1])  # type: ignore[misc]
    report.attempt("sound", lambda: report.add("sound", 1.0))
    late = Report("loader", tmp_path / "rows", ends_at=0.0)
    late.attempt("late", lambda: late.add("late", 1.0))
    found = {row.what: (row.value, row.note) for row in read_rows(tmp_path / "rows")}
    assert found["broken"] == ("FAILED", "IndexError: list index out of range")
    assert found["sound"][0] == 1.0
    assert found["late"] == ("left out", "no time left")


@pytest.mark.slow
def test_the_engine_section_with_recorded_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA, but what a graph would replay is called again."""
    build = bare_engine.build

    def recorded(*args: object, **rest: object) -> object:
        return build(*args, **rest, recorder=CallAgain())  # type: ignore[arg-type]

    monkeypatch.setattr(gpu_parts, "build", recorded)
    monkeypatch.setattr(
        bare_engine,
        "choose_attention",
        lambda setting, pool, heads: Choice("triton", RefilledReference(pool, heads)),
    )
    report = Report("engine", tmp_path / "rows", ends_at=1e18)
    gpu_parts.engine(report, torch.device("cpu"), tmp_path, "tiny")
    rows = {row.what: row for row in read_rows(tmp_path / "rows")}
    assert not [row for row in rows.values() if row.value == "FAILED"], rows
    assert "graphs recorded in" in rows
