"""One command records every bundle that is shown, and no other is kept (PF-6, PF-9)."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from perf import record
from perf.figures import DOCUMENTS
from perf.record import TABLE, Recordable, record_all
from perf.report.bundle import BenchResult, read, save
from perf.report.recording import RESULTS, ROOT
from tests.perf.test_bundle import bundle

COMMIT = "1" * 40


def shown() -> set[str]:
    """The bundles that the documents name below their figures, and those of the README's table."""
    texts = [(ROOT / name).read_text() for name in DOCUMENTS]
    told = [line for text in texts for line in re.findall(r"^From the bundles (.*?)\.", text, re.M)]
    listed = (ROOT / "perf/README.md").read_text().partition("| bundle |")[2].partition("\n\n")[0]
    told += re.findall(r"^\| (.*?) \|", listed, re.M)
    return set(re.findall(r"`([\w-]+)`", " ".join(told)))


def test_pf9_every_bundle_is_shown_or_listed_and_recorded_by_the_table() -> None:
    assert sorted(entry.name for entry in TABLE) == sorted(shown())
    recorded = {path.name for path in (ROOT / RESULTS).iterdir()}
    assert recorded == {path.name for entry in TABLE for path in entry.files}


def test_a_failed_one_is_told_and_the_others_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails, one that skips a part and one of another commit leave what there was."""
    monkeypatch.setattr(record, "ROOT", tmp_path)
    results = tmp_path / RESULTS
    (tmp_path / "bench.py").write_text(
        "import shutil, sys\n"
        "if sys.argv[1] == 'fails': sys.exit('no such thing')\n"
        "shutil.copy(sys.argv[1], sys.argv[-1])\n"
    )
    save(bundle(commit=COMMIT), tmp_path / "whole")
    skips = BenchResult("part", "what", 1.0, skipped="not installed")
    save(bundle(commit=COMMIT, results=[skips]), tmp_path / "skips")
    save(bundle(commit="2" * 40), tmp_path / "moved")
    for name in ("fails", "skips", "moved"):
        save(bundle(), results / f"{name}.json")
    entries = [Recordable(name, f"bench {name}") for name in ("fails", "skips", "moved", "whole")]
    output = io.StringIO()
    console = Console(file=output, width=300)
    assert record_all(entries, COMMIT, tmp_path, console) == 1
    told = output.getvalue()
    assert "not recorded: exit status 1: no such thing (build/record/fails/log.txt)" in told
    assert "not recorded: part: not installed" in told
    assert "not recorded: it is of commit 222222222222" in told
    assert "1 of 4 recorded at 111111111111" in told
    assert read(results / "whole.json").commit == COMMIT
    assert {read(results / f"{name}.json").commit for name in ("fails", "skips", "moved")} == {
        "0" * 40
    }
