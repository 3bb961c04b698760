"""The documents' figures are those of their bundles (PF-9)."""

import re
from pathlib import Path

import pytest

from perf import figures
from perf.figures import DOCUMENTS, UnknownFigure, is_old, rendered
from perf.report.bundle import BenchResult, Figure, save
from perf.report.recording import RESULTS, ROOT
from tests.perf.test_bundle import bundle

_FIGURE = re.compile(r"\d[\d.,]*\s?(?:%|×|µs|ms|tokens/s|met/s|MiB|GB|times\b)")
_AIMS = re.compile(r"\*\*Old\*\*|[Aa]im(?:s|ed)?\b|bound|hang up after|doubles?|in multiples")
_GIVEN = re.compile(r"[\d.]+ times the capacity|H100 \(80 GB\)")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_pf9_a_document_shows_what_its_bundles_have(name: str) -> None:
    """Where this fails: ``make figures``, and look at what has changed."""
    try:
        shown = rendered((ROOT / name).read_text(), ROOT / RESULTS, is_old)
    except LookupError as error:
        pytest.skip(f"git does not know what has changed since the bundles were recorded: {error}")
    assert (ROOT / name).read_text() == shown


def test_pf9_no_other_figure_is_on_the_page_of_performance() -> None:
    """But for aims and for what a benchmark was given."""
    text = (ROOT / "docs/performance.md").read_text()
    prose = re.sub(r"<!-- figures.*?<!-- end of figures -->", "", text, flags=re.S)
    prose = _GIVEN.sub("", prose)
    paragraphs = [each for each in prose.split("\n\n") if _FIGURE.search(each)]
    assert [each for each in paragraphs if not _AIMS.search(each)] == []


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two bundles; ``later`` has a part with two policies."""
    one = Figure.of("a.ratio", "ours over theirs", "", [1.5, 1.0, 2.0])
    mine = Figure.of("a.ours.rate", "ours", "/s", [30.0], better="higher")
    best = Figure.of("a.x.rate", "x", "/s", [20.0], better="higher")
    other = Figure.of("a.y.rate", "y", "/s", [10.0], better="higher")
    save(bundle(one, commit="1" * 40), tmp_path / "first.json")
    part = BenchResult("p", "two policies", 1.0, [mine, best, other])
    save(bundle(commit="2" * 40, results=[part], seed=5), tmp_path / "later.json")
    return tmp_path


def block(template: str, shown: str = "") -> str:
    return f"# A\n\n<!-- figures\n{template}\n-->\n{shown}<!-- end of figures -->\n\nB\n"


def shown_of(text: str) -> str:
    return text.partition("\n-->\n")[2].partition("\n\nFrom the bundles")[0]


def test_pf9_a_template_is_written_below_itself_and_again(results: Path) -> None:
    template = '| ratio | {{ fig("first", "a.ratio") }} | {{ mid("first", "a.ratio", 100) }} |'
    once = rendered(block(template), results, lambda commit, command: False)
    assert shown_of(once) == "| ratio | 1.5 (1 … 2) | 150 |"
    assert once.startswith(f"# A\n\n<!-- figures\n{template}\n-->\n") and once.endswith("\n\nB\n")
    assert rendered(once, results, lambda commit, command: False) == once
    stale = block(template, "| ratio | 9 |\n")
    assert rendered(stale, results, lambda commit, command: False) == once


def test_pf9_the_best_of_the_others_is_named(results: Path) -> None:
    text = block('{{ best("later", "a.*.rate", "ours") }}')
    assert shown_of(rendered(text, results, lambda commit, command: False)) == "20 (x)"


def test_pf9_what_is_old_is_marked(results: Path) -> None:
    text = block('{{ mid("first", "a.ratio") }} {{ mid("later", "a.x.rate") }}')
    new = rendered(text, results, lambda commit, command: commit[0] == "2")
    assert "From the bundles `first`, `later`. **Old, the code has changed since: `later`.**" in new


@pytest.mark.parametrize(
    ("call", "named"),
    [
        ('fig("none", "a")', "no bundle none"),
        ('fig("first", "b")', "no figure b"),
        ('best("first", "b.*.c")', r"no figure like b\.\*\.c"),
        ('raw("first", "machine", "soul")', "machine / soul"),
    ],
)
def test_pf9_what_is_not_there_is_named(results: Path, call: str, named: str) -> None:
    with pytest.raises(UnknownFigure, match=named):
        rendered(block(f"{{{{ {call} }}}}"), results, lambda commit, command: False)


def test_pf9_old_is_by_the_share_of_lines_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> list[str]:
        if arguments[0] == "grep":
            return ["a.py:60", "b.py:40"]
        few = arguments[3][0] == "1"
        return ["2\t1\ta.py", "1\t1\tb.py" if few else "2\t3\tb.py => c.py"]

    monkeypatch.setattr(figures, "_git", git)
    figures._share_changed.cache_clear()
    try:
        assert not is_old("1" * 40, "python -m perf.service --quick")
        assert is_old("2" * 40, "python -m perf.sim runs")
    finally:
        figures._share_changed.cache_clear()
