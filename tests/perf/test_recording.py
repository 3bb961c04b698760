"""A bundle belongs to a commit (PF-6): a checkout with changes records nothing."""

import subprocess
from pathlib import Path

import pytest

from perf.report.bundle import read
from perf.report.command import begin, new_parser
from perf.report.recording import Checkout, DirtyTree, Recording

RESULTS = Path("perf") / "results"


def git(root: Path, *arguments: str) -> str:
    who = ("-c", "user.name=A", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", "-C", str(root), *who, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one commit, which is what recordings look at."""
    root = tmp_path / "checkout"
    (root / RESULTS).mkdir(parents=True)
    (root / "code.py").write_text("1")
    (root / ".gitignore").write_text("/build/")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "one")
    of = Checkout.of
    monkeypatch.setattr(Checkout, "of", lambda at=root: of(at))
    return root


def test_a_clean_checkout_is_recorded_by_its_commit(root: Path) -> None:
    path = root / RESULTS / "bundle.json"
    run = Recording.begin(["perf.service", "--only", "a b"], path)
    run.save(run.bundle([]))
    bundle = read(path)
    assert (bundle.commit, bundle.dirty) == (git(root, "rev-parse", "HEAD"), False)
    assert bundle.command == "python -m perf.service --only 'a b'"
    # What was just recorded is no reason against the next one.
    assert Recording.begin(["perf.service"], path).checkout.changed == ()


@pytest.mark.parametrize("name", ["code.py", "new.py"])
def test_changes_and_new_files_are_named_before_anything_runs(root: Path, name: str) -> None:
    (root / name).write_text("2")
    with pytest.raises(DirtyTree, match=rf"out\.json: not in commit \w{{12}}: {name}; commit"):
        Recording.begin(["perf.service"], root / "build" / "out.json")
    assert Recording.begin(["perf.service"]).checkout.changed == (name,), "no bundle, no refusal"


def test_a_dirty_bundle_says_so_and_stays_out_of_the_results(root: Path) -> None:
    (root / "code.py").write_text("2")
    path = root / "build" / "out.json"
    run = Recording.begin(["perf.service"], path, allow_dirty=True)
    run.save(run.bundle([]))
    assert read(path).dirty
    with pytest.raises(DirtyTree, match="only a clean checkout is recorded in perf/results"):
        Recording.begin(["perf.service"], root / RESULTS / "out.json", allow_dirty=True)


def test_a_checkout_that_changes_during_the_run_is_dirty(root: Path) -> None:
    path = root / RESULTS / "bundle.json"
    run = Recording.begin(["perf.service"], path)
    (root / "code.py").write_text("2")
    assert run.bundle([]).dirty
    git(root, "commit", "-q", "-a", "-m", "two")
    assert run.bundle([]).dirty, "its figures may be of either commit"
    with pytest.raises(DirtyTree, match="HEAD, now"):
        run.save(run.bundle([]))
    assert not path.exists()


def test_outside_of_git_there_is_no_commit(tmp_path: Path) -> None:
    checkout = Checkout.of(tmp_path)
    assert checkout == Checkout(tmp_path, "unknown", ())
    checkout.check(tmp_path / "build" / "out.json", allow_dirty=False)
    with pytest.raises(DirtyTree, match="no git here says which commit"):
        checkout.check(tmp_path / RESULTS / "out.json", allow_dirty=True)


def test_a_bundle_says_its_seed_and_no_folder_of_this_machine(root: Path) -> None:
    parser, path = new_parser("doc"), root / "build" / "out.json"
    given = ["--json", str(path)]
    run = begin(parser, parser.parse_args(given), "perf.service", *given, seed=7)
    run.save(run.bundle([]))
    assert read(path).seed == 7
    assert read(path).command == "python -m perf.service --json out.json"
