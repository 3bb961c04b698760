"""Renders the figures of the documents from the recorded bundles (PF-9).

    python -m perf.figures            renders the figures of DOCUMENTS again

A document has a template in a comment, and the result directly below it::

    <!-- figures
    | tokens/s compared with vLLM, 8 streams | {{ fig("peers", "speed.ratio.8") }} |
    -->
    | tokens/s compared with vLLM, 8 streams | 1.38 (1.12 … 1.99) |

    From the bundles `peers`.
    <!-- end of figures -->

The comment is a Jinja template, which may call the methods of ``Figures``. A bundle is marked old
if more than ``MAX_CHANGED`` of the lines behind its figures have changed since its commit. Record
an old bundle again (``perf.record``).
"""

import re
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Final

import jinja2
import msgspec

from perf.report.bundle import Bundle, Figure
from perf.report.recording import RESULTS, ROOT
from perf.report.table import number

DOCUMENTS: Final = ("docs/performance.md",)
MAX_CHANGED: Final = 0.05
"""Maximum share (0 to 1) of the code behind a figure that may have been added or removed."""
_SERVICE: Final = ("catalog", "orchestrator", "pool")
_WORKER: Final = (*_SERVICE, "worker")
SOURCES: Final = {
    "perf.service": (*_WORKER, "model_repository", "perf/service"),
    "perf.engine": ("worker", "perf/engine"),
    "perf.goodput": (*_WORKER, "perf/goodput"),
    "perf.peers": (*_WORKER, "perf/peers"),
    "perf.sim": (
        "orchestrator/admission",
        "orchestrator/dispatch",
        "orchestrator/fair_share.py",
        "orchestrator/placement",
        "orchestrator/prediction",
        "orchestrator/queue",
        "orchestrator/tasks/run_lengths.py",
        "worker/scheduler",
        "perf/sim",
    ),
    "perf.clips": ("clips", "model_repository/slot", "perf/clips"),
    "perf.chaos": (*_SERVICE, "worker/service", "worker/engine", "perf/chaos"),
}
"""The code that each benchmark measures."""
NAMES: Final = {
    "no-prediction": "Tidegate by earliest deadline",
    "edf": "earliest deadline first",
    "fifo": "FIFO",
    "fifo-hang-up": "FIFO, clients hang up",
    "jitserve": "JITServe",
    "ours": "Tidegate",
    "qoserve": "QoServe",
    "slos-serve": "SLOs-Serve",
}
"""Display names of policies, by their names in keys."""
_BLOCK: Final = re.compile(
    r"(<!-- figures\n(?P<template>.*?)\n-->\n).*?(<!-- end of figures -->)", re.S
)


class UnknownFigure(ValueError):
    """A document asks for a bundle or a key that does not exist; the message names it."""


class Figures:
    """Functions that a template may call, and the bundles that it has used."""

    def __init__(self, results: Path, is_old: Callable[[str, str], bool]) -> None:
        """``is_old`` takes a commit and a command, and tells if the code has changed too much."""
        self._results = results
        self._is_old = is_old
        self.used: list[str] = []

    def fig(self, bundle: str, key: str, scale: float = 1.0) -> str:
        """Median and spread of a figure, without the unit: ``1.60 (1.10 … 1.72)``."""
        figure = self._figure(bundle, key)
        middle = number(scale * figure.median)
        if figure.n == 1 or figure.low == figure.high:
            return middle
        return f"{middle} ({number(scale * figure.low)} … {number(scale * figure.high)})"

    def mid(self, bundle: str, key: str, scale: float = 1.0) -> str:
        """Median of a figure alone, times ``scale``."""
        return number(scale * self._figure(bundle, key).median)

    def best(self, bundle: str, pattern: str, *but: str, scale: float = 1.0) -> str:
        """Best of the figures whose keys match ``pattern``, times ``scale``, with the name that
        matched its single ``*``: ``18.4 (JITServe)``. Skips names that match one of ``but``."""
        found = {
            name: figure
            for name, figure in self._matching(bundle, pattern).items()
            if "." not in name and not any(fnmatchcase(name, each) for each in but)
        }
        if not found:
            raise UnknownFigure(f"{bundle} has no figure like {pattern}")
        best = (min if next(iter(found.values())).better == "lower" else max)(
            found, key=lambda name: found[name].median
        )
        policy, at, rows = best.partition("@")
        told = NAMES.get(policy, policy) + (f", {rows} rows" if at else "")
        return f"{number(scale * found[best].median)} ({told})"

    def _matching(self, bundle: str, pattern: str) -> dict[str, Figure]:
        before, _, after = pattern.partition("*")
        return {
            key.removeprefix(before).removesuffix(after): figure
            for key, figure in self._bundle(bundle).figures().items()
            if fnmatchcase(key, pattern)
        }

    def raw(self, bundle: str, *path: str) -> Any:
        """Value of a bundle outside its list of figures, by its path of names."""
        value: Any = self._read(bundle)
        for name in path:
            try:
                value = value[name]
            except (KeyError, TypeError):
                raise UnknownFigure(f"{bundle} has no {' / '.join(path)}") from None
        return value

    def bundles(self) -> str:
        """One line that lists the used bundles, and names the old ones."""
        old = [f"`{name}`" for name in self.used if self._old(self._read(name))]
        told = "From the bundles " + ", ".join(f"`{name}`" for name in self.used) + "."
        return f"{told} **Old, the code has changed since: {', '.join(old)}.**" if old else told

    def _old(self, facts: dict[str, Any]) -> bool:
        return self._is_old(facts["commit"], facts["command"])

    def _read(self, name: str) -> dict[str, Any]:
        path = self._results / f"{name}.json"
        if not path.is_file():
            raise UnknownFigure(f"there is no bundle {name}")
        if name not in self.used:
            self.used.append(name)
        return dict(_decoded(path))

    def _bundle(self, name: str) -> Bundle:
        return msgspec.convert(self._read(name), Bundle)

    def _figure(self, name: str, key: str) -> Figure:
        figure = self._bundle(name).figures().get(key)
        if figure is None:
            raise UnknownFigure(f"{name} has no figure {key}")
        return figure


@cache
def _decoded(path: Path) -> dict[str, Any]:
    return dict(msgspec.json.decode(path.read_bytes(), type=dict[str, Any]))


def rendered(text: str, results: Path, is_old: Callable[[str, str], bool]) -> str:
    """Text of a document with all of its blocks rendered again. Raises ``UnknownFigure``."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True)

    def block(match: re.Match[str]) -> str:
        figures = Figures(results, is_old)
        names = ("fig", "mid", "best", "raw")
        template = environment.from_string(match["template"])
        body = template.render({name: getattr(figures, name) for name in names}).strip("\n")
        return f"{match[1]}{body}\n\n{figures.bundles()}\n{match[3]}"

    return _BLOCK.sub(block, text)


def is_old(commit: str, command: str) -> bool:
    """Whether too much of the code behind a benchmark's figures has changed since ``commit``.

    Raises ``LookupError`` if git cannot tell: without a checkout, or without its history.
    """
    module = ".".join(command.split()[2].split(".")[:2])
    return _share_changed(commit, SOURCES[module]) > MAX_CHANGED


@cache
def _share_changed(commit: str, paths: tuple[str, ...]) -> float:
    """Lines added or removed since ``commit``, divided by the current number of lines."""
    specs = [
        f":(glob){path}" if path.endswith(".py") else f":(glob){path}/**/*.py" for path in paths
    ]
    lines = sum(int(line.rpartition(":")[2]) for line in _git("grep", "-c", "", "--", *specs))
    changed = 0
    for told in _git("diff", "--numstat", "--find-renames", commit, "--", *specs):
        added, removed, _ = told.split("\t", 2)
        changed += int(added) + int(removed)
    return changed / max(1, lines)


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise LookupError(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.splitlines()


def main() -> int:
    for name in DOCUMENTS:
        path = ROOT / name
        try:
            path.write_text(rendered(path.read_text(), ROOT / RESULTS, is_old))
        except (UnknownFigure, LookupError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
