"""Bundles, the table and the gate (PF-1, PF-6)."""

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from perf import gate
from perf.report.bundle import SCHEMA_VERSION, BenchResult, Bundle, Figure, MachineFacts, read, save
from perf.report.machine import CpuTimes
from perf.report.recording import Recording
from perf.report.table import show
from perf.stack.context import Bench
from tests.support.cases import for_each


def bundle(*figures: Figure, **changes: object) -> Bundle:
    fields: dict[str, object] = {
        "created": "2026-01-01T00:00:00+00:00",
        "command": "python -m perf.service",
        "commit": "0" * 40,
        "quick": True,
        "machine": MachineFacts("a cpu", 2, 4.0, [], "Linux", 0.5),
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


def test_a_foreign_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bundle.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"bundle\.json is not a benchmark bundle"):
        read(path)
    save(bundle(schema=SCHEMA_VERSION + 1), path)
    with pytest.raises(ValueError, match="schema"):
        read(path)


def test_a_run_says_what_was_stolen_while_it_lasted(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([CpuTimes(100, 10), CpuTimes(400, 110)])
    monkeypatch.setattr(CpuTimes, "now", lambda: next(times))
    run = Recording.begin(["perf.service"])
    output = io.StringIO()
    show(run.bundle([]), Console(file=output, width=200))
    assert "before, 25 % stolen" in output.getvalue()
    monkeypatch.setattr(CpuTimes, "now", lambda: None)
    assert Recording.begin(["perf.service"]).bundle([]).machine.stolen_percent is None


@for_each(
    ("better", "now", "tolerance", "passed"),
    [
        ("lower", 1.49, 1.5, True),
        ("lower", 1.51, 1.5, False),
        ("lower", 1.6, 1.7, True),  # which the program states now
        ("higher", 0.67, 1.5, True),
        ("higher", 0.66, 1.5, False),
        ("higher", 0.0, 1.5, False),
    ],
)
def test_the_gate_compares_by_factor(
    better: str, now: float, tolerance: float, passed: bool
) -> None:
    """PF-1: a regression gate on ratios."""
    current = bundle(ratio("r", now, better, tolerance))
    [verdict] = gate.compare(bundle(ratio("r", 1.0, better)), current)
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
