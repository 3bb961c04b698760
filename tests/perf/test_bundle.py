"""Bundles, the table and the gate (PF-1, PF-6)."""

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from perf import gate
from perf.report.bundle import SCHEMA_VERSION, BenchResult, Bundle, Figure, Machine, read, save
from perf.report.machine import CpuTimes, describe_machine, versions
from perf.report.recording import Recording
from perf.report.table import show
from perf.stack.context import Bench


def bundle(*figures: Figure, **changes: object) -> Bundle:
    fields: dict[str, object] = {
        "created": "2026-01-01T00:00:00+00:00",
        "command": "python -m perf.service",
        "commit": "0" * 40,
        "quick": True,
        "machine": Machine("a cpu", 2, 4.0, [], "Linux", 0.5),
        "versions": {"python": "3.11"},
        "engine": "torch 0.1.0",
        "engine_digest": "aa" * 32,
        "model": "demo",
        "model_digest": "bb" * 32,
        "results": [BenchResult("relay", "what", 1.0, list(figures))],
    }
    return Bundle(**(fields | changes))  # type: ignore[arg-type]


def ratio(key: str, value: float, better: str = "lower", tolerance: float | None = 1.5) -> Figure:
    return Figure.of(key, key, "", [value], better=better, tolerance=tolerance)  # type: ignore[arg-type]


def test_a_bundle_survives_its_file(tmp_path: Path) -> None:
    """PF-6: figures, machine, command, commit, engine and model digests."""
    path = tmp_path / "deep" / "bundle.json"
    saved = bundle(Figure.of("k", "label", "ms", [3.0, 1.0, 2.0], spread="p5–p95"))
    save(saved, path)
    assert read(path) == saved
    raw = msgspec.json.decode(path.read_bytes())
    assert {"machine", "command", "commit", "engine_digest", "model_digest"} <= raw.keys()


def test_a_figure_is_the_median_with_its_spread() -> None:
    figure = Figure.of("k", "label", "ms", [3.0, 1.0, 8.0])
    assert (figure.median, figure.low, figure.high, figure.n) == (3.0, 1.0, 8.0, 3)
    tail = Figure.tail_of("k", "label", "ms", [float(v) for v in range(101)], 99)
    assert tail.low <= tail.median == 99.0 <= tail.high


def test_a_foreign_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bundle.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"bundle\.json is not a benchmark bundle"):
        read(path)
    save(bundle(schema=SCHEMA_VERSION + 1), path)
    with pytest.raises(ValueError, match="schema"):
        read(path)


def test_what_the_host_took_is_a_share_of_what_was_wanted(tmp_path: Path) -> None:
    stat = tmp_path / "stat"

    def times(line: str) -> CpuTimes:
        stat.write_text(f"{line}\ncpu0 1 2 3 4 5 6 7 8 0 0\n")
        found = CpuTimes.now(stat)
        assert found is not None
        return found

    before = times("cpu  100 10 20 5000 300 1 2 50 0 0")
    assert before == (133, 50)
    assert before.stolen_percent(times("cpu  130 20 30 9000 400 5 8 80 0 0")) == 33.3
    assert before.stolen_percent(before) == 0.0
    stat.write_text("cpu 1 2\n")
    assert CpuTimes.now(stat) is None and CpuTimes.now(tmp_path / "none") is None


def test_a_run_says_what_was_stolen_while_it_lasted(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([CpuTimes(100, 10), CpuTimes(400, 110)])
    monkeypatch.setattr(CpuTimes, "now", lambda: next(times))
    run = Recording.begin(["perf.service"])
    output = io.StringIO()
    show(run.bundle([]), Console(file=output, width=200))
    assert "before, 25 % stolen" in output.getvalue()
    monkeypatch.setattr(CpuTimes, "now", lambda: None)
    assert Recording.begin(["perf.service"]).bundle([]).machine.stolen_percent is None


def test_the_table_says_what_failed_and_what_was_skipped() -> None:
    shown = bundle(
        results=[
            BenchResult("one", "works", 1.0, [Figure.of("k", "label", "ms", [1234.0, 1300.0])]),
            BenchResult("two", "cannot", 0.1, skipped="no [thing] here"),
            BenchResult("three", "breaks", 0.1, failed="ValueError: oh"),
        ]
    )
    output = io.StringIO()
    show(shown, Console(file=output, width=120))
    text = output.getvalue()
    assert "1 267 ms" in text
    assert "skipped: no [thing] here" in text
    assert "failed: ValueError: oh" in text


@pytest.mark.parametrize(
    ("better", "recorded", "now", "passed"),
    [
        ("lower", 1.0, 1.49, True),
        ("lower", 1.0, 1.51, False),
        ("lower", 1.0, 0.1, True),
        ("higher", 1.0, 0.67, True),
        ("higher", 1.0, 0.66, False),
        ("higher", 1.0, 9.0, True),
        ("higher", 1.0, 0.0, False),
    ],
)
def test_the_gate_compares_by_factor(
    better: str, recorded: float, now: float, passed: bool
) -> None:
    """PF-1: a regression gate on ratios."""
    [verdict] = gate.compare(bundle(ratio("r", recorded, better)), bundle(ratio("r", now, better)))
    assert verdict.passed is passed


def test_a_gate_that_was_not_measured_fails() -> None:
    [verdict] = gate.compare(bundle(ratio("r", 1.0)), bundle())
    assert not verdict.passed


def test_figures_without_tolerance_are_no_gates() -> None:
    recorded = bundle(ratio("r", 1.0), ratio("plain", 1.0, tolerance=None))
    verdicts = gate.compare(recorded, bundle(ratio("r", 1.0), ratio("plain", 99.0)))
    assert [verdict.recorded.key for verdict in verdicts] == ["r"]
    with pytest.raises(ValueError, match="no figure with a tolerance"):
        gate.compare(bundle(), bundle())


@pytest.mark.parametrize(("now", "status"), [(1.2, 0), (5.0, 1)])
def test_the_gate_command_reports_and_exits(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    now: float,
    status: int,
) -> None:
    save(bundle(ratio("r", 1.0)), tmp_path / "recorded.json")
    save(bundle(ratio("r", now)), tmp_path / "now.json")
    arguments = ["--recorded", str(tmp_path / "recorded.json")]
    monkeypatch.setattr("sys.argv", ["gate", *arguments, "--current", str(tmp_path / "now.json")])
    assert gate.main() == status
    assert ("regressed" in capsys.readouterr().out) == bool(status)


@pytest.mark.parametrize(("failed", "status"), [("", 0), ("5 of 6", 1)])
@pytest.mark.parametrize("is_same_tier", [True, False])
def test_the_gate_runs_promises_whatever_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: str, status: int, is_same_tier: bool
) -> None:
    """By count: a bench that fails, fails the gate, on machines of other tiers too."""
    ran: list[str] = []

    def run(benches: list[Bench], console: Console) -> Bundle:
        ran.extend(bench.name for bench in benches)
        kept = BenchResult(name="overtaking", what="", seconds=1.0, failed=failed)
        measured = bundle(ratio("r", 1.0))
        return msgspec.structs.replace(measured, results=[*measured.results, kept])

    monkeypatch.setattr(gate, "_run", run)
    if not is_same_tier:
        monkeypatch.setattr(gate, "why_not_compared", lambda there, here: "another tier")
    save(bundle(ratio("r", 1.0)), tmp_path / "recorded.json")
    monkeypatch.setattr("sys.argv", ["gate", "--recorded", str(tmp_path / "recorded.json")])
    assert gate.main() == status
    assert {"overtaking", "flood"} <= set(ran)


def test_the_machine_describes_itself() -> None:
    machine = describe_machine()
    assert machine.cores >= 1
    assert machine.memory_gib > 0
    assert machine.cpu
    assert "python" in versions()


def test_the_tolerance_is_the_one_that_the_program_states_now() -> None:
    recorded, current = bundle(ratio("r", 1.0)), bundle(ratio("r", 1.6, tolerance=1.7))
    (verdict,) = gate.compare(recorded, current)
    assert verdict.passed and verdict.tolerance == 1.7
