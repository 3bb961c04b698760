"""Imports run downwards only, and a planted one that does not is found; small constructors."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("orchestrator", "worker", "client", "perf")


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("orchestrator/clock.py", "import orchestrator.service", "the orchestrator's floors"),
        ("orchestrator/api/http/fields.py", "import orchestrator.api.native", "dialects are edges"),
        ("orchestrator/tasks/task.py", "import aiohttp", "only the edge speaks HTTP"),
        ("worker/scheduler/plan.py", "import worker.engine.engine", "the worker's floors"),
        ("orchestrator/health.py", "import worker.models", "both sides share the protocol only"),
        ("worker/core.py", "import perf.load.cpu", "nothing that runs needs the benchmarks"),
    ],
)
def test_an_upward_import_is_found(tmp_path: Path, file: str, line: str, broken: str) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "checkpoint", "results")
    for package in ("orchestrator", "worker", "perf"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    planted = tmp_path / file
    planted.write_text(f"{planted.read_text('utf-8')}\n{line}\n", "utf-8")
    command = "from importlinter.cli import lint_imports_command as lint; lint()"
    run = subprocess.run(
        [sys.executable, "-c", command, "--no-cache"], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 1, run.stdout + run.stderr
    assert f"{broken} BROKEN" in run.stdout
    assert run.stdout.count("BROKEN") == 1


def test_no_constructor_takes_more_than_seven_arguments() -> None:
    """What belongs together is handed over together: a frozen config, a group of collaborators."""
    too_many = []
    for file in sorted(f for p in PACKAGES for f in (ROOT / p).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if len(arguments) > 1 + 7:
                    too_many.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not too_many
