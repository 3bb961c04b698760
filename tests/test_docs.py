"""Documents that would go stale unseen."""

import re
import subprocess
from pathlib import Path

from tests.support.cases import for_each

ROOT = Path(__file__).parents[1]
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
PAGES = sorted(p for p in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")))


def folders_of_code() -> set[str]:
    """Every folder that holds a Python file which git knows or would know."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return {str(Path(name).parent) for name in listed if (ROOT / name).exists()}


def test_the_map_has_every_folder_and_no_other() -> None:
    """Of the tests, which mirror the tree, only what is special has a line."""
    mapped = set(re.findall(r"^\| `([\w/]+)/` \|", ARCHITECTURE, re.M))
    here = {f for f in folders_of_code() if not f.startswith("tests/")}
    special = {"tests/support", "tests/examples", "tests/e2e"}
    assert mapped == here | special


def test_what_the_pages_name_is_there() -> None:
    """Paths to Python files, in backticks, from the root or from below one of the packages."""
    bases = [ROOT, ROOT / "orchestrator", ROOT / "worker", ROOT / "perf"]
    for page in PAGES:
        for name in re.findall(r"`([\w./]+\.py)`", page.read_text()):
            found = [b for b in (*bases, page.parent) if (b / name).exists()]
            assert found, f"{page.relative_to(ROOT)} names {name}, which is not there"


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


@for_each("page", PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text())
    for target, anchor in links:
        there = page.parent / target if target else page
        assert there.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(there), f"{page.name} links to {target}#{anchor}"


def test_the_pages_are_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900
    # Comments are templates of figures (``perf.figures``), which no page shows.
    pages = [
        re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.S) for page in ROOT.glob("docs/*.md")
    ]
    assert sum(len(page.split()) for page in pages) <= 35_000


def test_the_tour_can_be_read_in_one_sitting() -> None:
    named = re.findall(r"^\| `([\w/]+\.py)`", (ROOT / "docs/tour.md").read_text(), re.M)
    sizes = [len((ROOT / name).read_text("utf-8").splitlines()) for name in named]
    assert len(sizes) > 5 and max(sizes) <= 300 and sum(sizes) <= 1500


def test_pf9_the_figures_of_the_readme_are_the_page_of_performances() -> None:
    """``perf.figures`` writes that page from bundles; where this fails, copy its rows."""
    table = (
        (ROOT / "README.md").read_text().partition("## Three figures\n")[2].partition("\n\nMore")[0]
    )
    rows = re.findall(r"^\| (?!case|---).+", table, re.M)
    assert len(rows) == 3
    assert set(rows) <= set((ROOT / "docs/performance.md").read_text().splitlines())


def test_where_it_is_is_there() -> None:
    """``file``: ``name`` in the map's table of questions."""
    table = ARCHITECTURE.partition("## Where is it?")[2].partition("\n## ")[0]
    told = re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", table)
    assert len(told) >= 5
    for file, names in told:
        text = (ROOT / file).read_text()
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"(def|class) {name}\b", text), f"{file} has no {name}"
    for question in re.findall(r"^\| (.+\?) \| (.+) \|$", table, re.M):
        assert len(re.findall(r"\.(?:py|md)\b", question[1].replace("](extending.md)", ""))) <= 2
