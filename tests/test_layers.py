"""Imports run downwards only, and a planted one that does not is found; small constructors."""

import ast
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "catalog",
    "client",
    "clips",
    "orchestrator",
    "perf",
    "picker",
    "pool",
    "protocol",
    "tools",
    "worker",
)


PLANTED = {
    "the orchestrator's floors": "orchestrator.clock -> orchestrator.service",
    "the host, the service, the catalog": "catalog.paths -> orchestrator.clock",
    "dialects are edges": "orchestrator.api.http.fields -> orchestrator.api.native",
    "only the edge speaks HTTP": "orchestrator.tasks.task -> aiohttp",
    "the worker's floors": "worker.scheduler.plan -> worker.engine.engine",
    "both sides share the protocol only": "orchestrator.health -> worker.models",
    "the worker knows neither orchestrator nor pool": "worker.core -> catalog.errors",
    "the protocol reads nobody": "protocol.blocks -> clips.plan.recipe",
    "nothing that runs needs the benchmarks": "clips.render.errors -> perf.report.stats",
}
"""An import that must not be, by the contract that forbids it."""


def test_each_upward_import_is_found(tmp_path: Path) -> None:
    """By its contract and no other one, and nothing else is found."""
    ignored = shutil.ignore_patterns("__pycache__", "checkpoint", "results")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for planted in PLANTED.values():
        importer, _, imported = planted.partition(" -> ")
        file = tmp_path / f"{importer.replace('.', '/')}.py"
        file.write_text(f"{file.read_text('utf-8')}\nimport {imported}\n", "utf-8")
    command = "from importlinter.cli import lint_imports_command as lint; lint()"
    run = subprocess.run(
        [sys.executable, "-c", command, "--no-cache"], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 1, run.stdout + run.stderr
    broken = run.stdout.partition("Broken contracts")[2]
    found = dict(re.findall(r"^(\S.*)\n-+\n\n.*\n\n- +(\S+ -> \S+) ", broken, re.M))
    assert found == PLANTED, run.stdout
    assert broken.count(" -> ") == len(PLANTED), run.stdout


class Class(NamedTuple):
    """A class of a module, and how many arguments its constructor takes in addition to ``self``."""

    name: str
    place: str
    arguments: int


_CLASS = re.compile(r"^class (\w+)", re.M)
_CONSTRUCTOR = re.compile(r"^    def __init__\((.*?)\)(?: -> \w+)?:", re.M | re.S)


@cache
def classes(package: str) -> list[Class]:
    """Found by their text: to parse all of it takes ten times as long."""
    found = []
    for file in sorted((ROOT / package).rglob("*.py")):
        text = file.read_text("utf-8")
        heads = list(_CLASS.finditer(text))
        for head, after in zip(heads, [*heads[1:], None], strict=False):
            place = f"{file.relative_to(ROOT)}:{text.count(chr(10), 0, head.start()) + 1}"
            body = text[head.end() : after and after.start()]
            found.append(Class(head[1], place, arguments_of(body)))
    return found


def arguments_of(body: str) -> int:
    """Of a class's constructor; ``body`` is the text from its name to the next class."""
    found = _CONSTRUCTOR.search(body)
    if found is None:
        return 0
    (function,) = ast.parse(f"def f({found[1]}): ...").body
    assert isinstance(function, ast.FunctionDef)
    takes = function.args
    return len([*takes.posonlyargs, *takes.args, *takes.kwonlyargs]) - 1


def test_no_constructor_takes_more_than_seven_arguments() -> None:
    """What belongs together is handed over together: a frozen config, a group of collaborators."""
    every = [each for package in PACKAGES for each in classes(package)]
    assert not [each.place for each in every if each.arguments > 7]


def test_a_public_class_has_its_name_to_itself_in_its_package() -> None:
    """A name that a reader meets means one thing. What begins with an underscore is a module's
    own."""
    for package in PACKAGES:
        homes: dict[str, list[str]] = {}
        for each in classes(package):
            if not each.name.startswith("_"):
                homes.setdefault(each.name, []).append(each.place)
        assert not {name: places for name, places in homes.items() if len(places) > 1}
