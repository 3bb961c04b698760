"""Writes the figures of the documents from the recorded bundles (PF-9).

    python -m perf.figures            writes the figures of DOCUMENTS anew
    python -m perf.figures --check    changes nothing; fails where they would change

A document says what it wants to show in a comment, and has the result right below it::

    <!-- figures
    | tokens/s beside vLLM, 8 streams | {{ fig("peers", "speed.ratio.8") }} |
    -->
    | tokens/s beside vLLM, 8 streams | 1.38 (1.12 … 1.99) |

    - `peers`: its command, commit, day and machine.
    <!-- end of figures -->

The comment is a Jinja template; ``Figures`` has what it may call. A bundle is marked old once more
than ``MAX_CHANGED`` of the lines behind its figures have changed since its commit: then it is to
be recorded anew (``perf.record``).
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Final

import jinja2
import msgspec

from perf.report.bundle import Bundle, Figure, Machine
from perf.report.recording import RESULTS, ROOT
from perf.report.table import number

DOCUMENTS: Final = ("docs/performance.md",)
BRIEF: Final = DOCUMENTS
"""Documents that name their bundles in one line; the others say more of them."""
MAX_CHANGED: Final = 0.05
"""Largest share (0 to 1) of the code behind a figure that may have been added or removed."""
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
"""The code that the figures of each benchmark are about."""
_NOW: Final = {"perf.slot": "perf.clips"}
"""Names of benchmarks, by those that older bundles have."""
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
"""Names of policies for people, by their spelling in keys."""
_BLOCK: Final = re.compile(
    r"(<!-- figures\n(?P<template>.*?)\n-->\n).*?(<!-- end of figures -->)", re.S
)


class UnknownFigure(ValueError):
    """A document asks for a bundle or a key that does not exist; the message names it."""


class Figures:
    """Functions that a template may call, and the bundles that it has used."""

    def __init__(self, results: Path, is_old: Callable[[str, str], bool]) -> None:
        """``is_old`` takes a commit and a command: whether the code has changed too much since."""
        self._results = results
        self._is_old = is_old
        self.used: list[str] = []

    def has(self, bundle: str, key: str = "") -> bool:
        """Whether a bundle was recorded, with a figure of that key if one is named."""
        path = self._results / f"{bundle}.json"
        if not path.is_file():
            return False
        return not key or key in msgspec.convert(_decoded(path), Bundle).figures()

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
        """Best of the figures whose keys match, times ``scale``, with the name that stands for the
        one ``*`` of ``pattern``, leaving out those like one of ``but``: ``18.4 (JITServe)``."""
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

    def rows(self, bundle: str, *patterns: str) -> str:
        """Table of the figures whose keys match, in the order of ``patterns``."""
        parts = [
            (part.what, figure) for part in self._bundle(bundle).results for figure in part.figures
        ]
        lines, of_part = ["| | median (spread) | samples |", "|---|---|---|"], ""
        for pattern in patterns:
            matching = [one for one in parts if fnmatchcase(one[1].key, pattern)]
            if not matching:
                raise UnknownFigure(f"{bundle} has no figure like {pattern}")
            for part, figure in matching:
                if part != of_part:
                    lines.append(f"| **{part}** | | |")
                    of_part = part
                value = f"{self.fig(bundle, figure.key)} {figure.unit}".strip()
                lines.append(f"| {figure.label} | {value} | {figure.n} |")
        return "\n".join(lines)

    def found(self, bundle: str, section: str, what: str) -> str:
        """A row of ``perf.engine.gpu``'s table with its unit: ``9.81 ms``."""
        for row in self.raw(bundle, "rows"):
            if (row["section"], row["what"]) == (section, what):
                value = row["value"]
                told = value if isinstance(value, str) else number(value)
                return f"{told} {row['unit']}".strip()
        raise UnknownFigure(f"{bundle} has no row {section} / {what}")

    def raw(self, bundle: str, *path: str) -> Any:
        """Value of a bundle that is not a list of figures, by the names on the way to it."""
        value: Any = self._read(bundle)
        for name in path:
            try:
                value = value[name]
            except (KeyError, TypeError):
                raise UnknownFigure(f"{bundle} has no {' / '.join(path)}") from None
        return value

    def bundles_in_brief(self) -> str:
        """One line about the bundles that were used, with the old ones by name."""
        old = [f"`{name}`" for name in self.used if self._old(self._read(name))]
        told = "From the bundles " + ", ".join(f"`{name}`" for name in self.used) + "."
        return f"{told} **Old, the code has changed since: {', '.join(old)}.**" if old else told

    def bundles(self) -> Iterator[str]:
        """Lines about the bundles used, one each: which commit, when, where, and whether it is
        old."""
        for name in self.used:
            facts = self._read(name)
            machine = msgspec.convert(facts["machine"], Machine)
            where = [f"{machine.cpu}, {machine.cores} cores"]
            if machine.gpus:
                where.append(", ".join(machine.gpus))
            if machine.tier:
                where.append(f"tier {machine.tier}")
            where.append(
                f"load {machine.load_before:g} before"
                if machine.stolen_percent is None
                else f"{machine.stolen_percent:g} % of the time stolen"
            )
            seed = facts.get("seed")
            drawn = "" if seed is None or "--seed " in facts["command"] else f", seed {seed}"
            old = " **Old: the code has changed since.**" if self._old(facts) else ""
            yield (
                f"- `{name}`: `{facts['command']}`{drawn}, commit {facts['commit'][:10]}, "
                f"{facts['created'][:10]}; {'; '.join(where)}.{old}"
            )

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


def rendered(
    text: str, results: Path, is_old: Callable[[str, str], bool], *, brief: bool = False
) -> str:
    """Text of a document with all of its blocks written anew. Raises ``UnknownFigure``."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True)

    def block(match: re.Match[str]) -> str:
        figures = Figures(results, is_old)
        names = ("has", "fig", "mid", "best", "rows", "found", "raw")
        template = environment.from_string(match["template"])
        body = template.render({name: getattr(figures, name) for name in names}).strip("\n")
        told = figures.bundles_in_brief() if brief else "\n".join(figures.bundles())
        return f"{match[1]}{body}\n\n{told}\n{match[3]}"

    return _BLOCK.sub(block, text)


def is_old(commit: str, command: str) -> bool:
    """Whether too much of the code behind a benchmark's figures has changed since ``commit``.

    Raises ``LookupError`` where git does not know: no checkout, or one without its history.
    """
    module = ".".join(command.split()[2].split(".")[:2])
    return _share_changed(commit, SOURCES[_NOW.get(module, module)]) > MAX_CHANGED


@cache
def _share_changed(commit: str, paths: tuple[str, ...]) -> float:
    """Lines added or removed since ``commit`` over the lines that there are."""
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    options = parser.parse_args()
    differs = False
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text()
        try:
            new = rendered(text, ROOT / RESULTS, is_old, brief=name in BRIEF)
        except (UnknownFigure, LookupError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        if new != text:
            differs = True
            print(f"{name}: {'differs from its bundles' if options.check else 'written anew'}")
            if not options.check:
                path.write_text(new)
    return int(differs and options.check)


if __name__ == "__main__":
    sys.exit(main())
