"""Saves a run's figures with its machine and versions, and never under a wrong commit.

A checkout with changes is not a commit, so nothing is saved from it, except with ``--allow-dirty``.
Then the bundle says ``dirty``, and it may not be among the recorded bundles.
"""

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Self

import msgspec

from perf.report.bundle import BenchResult, Bundle, MachineFacts, save
from perf.report.machine import CpuTimes, describe_machine, output_of, versions
from protocol import ModelCard

ROOT: Final = Path(__file__).resolve().parents[2]
RESULTS: Final = Path("perf", "results")
UNKNOWN: Final = "unknown"
_NAMED: Final = 10


class DirtyTree(RuntimeError):
    """The checkout has changes that no commit has; the message names them."""


@dataclass(frozen=True, slots=True)
class Checkout:
    """``commit`` is "unknown" without git; ``changed`` are the files that differ from it, new ones
    among them. Recorded bundles do not count: no figure depends on them."""

    root: Path
    commit: str
    changed: tuple[str, ...]

    @classmethod
    def of(cls, root: Path = ROOT) -> Self:
        git = ("git", "-C", str(root))
        commit = output_of(*git, "rev-parse", "HEAD")
        if not commit:
            return cls(root, UNKNOWN, ())
        exclude = f":(exclude){RESULTS.as_posix()}"
        # Lines of the output have two letters, a blank and the path.
        status = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=all", "--", ".", exclude],
            capture_output=True,
            text=True,
            check=True,
        )
        return cls(root, commit, tuple(line[3:] for line in status.stdout.splitlines()))

    def check(self, path: Path, *, allow_dirty: bool) -> None:
        """Raise ``DirtyTree`` when a bundle of this checkout must not be saved at ``path``."""
        is_recorded = path.resolve().is_relative_to((self.root / RESULTS).resolve())
        if is_recorded and self.commit == UNKNOWN:
            raise DirtyTree(f"{path}: no git here says which commit this is; save it elsewhere")
        if not self.changed or (allow_dirty and not is_recorded):
            return
        names = ", ".join(self.changed[:_NAMED])
        if len(self.changed) > _NAMED:
            names += f" and {len(self.changed) - _NAMED} more"
        do = (
            f"only a clean checkout is recorded in {RESULTS}: commit or stash them first"
            if is_recorded
            else "commit or stash them, or pass --allow-dirty, and the bundle says that it is dirty"
        )
        raise DirtyTree(f"{path}: not in commit {self.commit[:12]}: {names}; {do}")


@dataclass(frozen=True, slots=True)
class Recording:
    """State when a run begins: its command, its machine, its checkout."""

    command: str
    machine: MachineFacts
    checkout: Checkout
    path: Path | None = None
    allow_dirty: bool = False
    cpu_before: CpuTimes | None = None
    seed: int | None = None

    @classmethod
    def begin(
        cls,
        command: Sequence[str],
        path: Path | None = None,
        *,
        allow_dirty: bool = False,
        seed: int | None = None,
    ) -> Self:
        """Recording of a run that begins. Raises ``DirtyTree`` before anything is measured that
        could not be saved."""
        checkout = Checkout.of()
        if path is not None:
            checkout.check(path, allow_dirty=allow_dirty)
        line = shlex.join(["python", "-m", *(_without_folders(each) for each in command)])
        return cls(line, describe_machine(), checkout, path, allow_dirty, CpuTimes.now(), seed)

    def facts(self) -> dict[str, object]:
        """Facts that every bundle has about its run, which ends here."""
        return {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": self.command,
            **({} if self.seed is None else {"seed": self.seed}),
            "commit": self.checkout.commit,
            "dirty": bool(self._now().changed),
            "machine": self._machine(),
            "versions": versions(),
        }

    def bundle(
        self,
        results: list[BenchResult],
        card: ModelCard | None = None,
        *,
        quick: bool = False,
        more_versions: Mapping[str, str] | None = None,
    ) -> Bundle:
        """Bundle of ``results``, found with the engine and the model of ``card``."""
        facts = self.facts() | {"versions": versions() | dict(more_versions or {})}
        return Bundle(
            **facts,  # type: ignore[arg-type]
            quick=quick,
            engine=f"{card.engine} {card.engine_version}" if card else "none",
            engine_digest=card.engine_digest if card else "",
            model=card.model if card else "none",
            model_digest=card.model_digest if card else "",
            results=results,
        )

    def save(self, bundle: object) -> None:
        """Save as indented JSON, where the command was given a path. Raises ``DirtyTree``, also
        when the checkout has changed since the run began."""
        if self.path is not None:
            self._now().check(self.path, allow_dirty=self.allow_dirty)
            save(bundle, self.path)

    def _machine(self) -> MachineFacts:
        before, now = self.cpu_before, CpuTimes.now()
        if before is None or now is None:
            return self.machine
        return msgspec.structs.replace(self.machine, stolen_percent=before.stolen_percent(now))

    def _now(self) -> Checkout:
        """The checkout with what has changed before the run or during it."""
        now = Checkout.of(self.checkout.root)
        moved = () if now.commit == self.checkout.commit else (f"HEAD, now {now.commit[:12]}",)
        changed = dict.fromkeys((*self.checkout.changed, *now.changed, *moved))
        return replace(self.checkout, changed=tuple(changed))


def _without_folders(argument: str) -> str:
    """``argument`` without folders that only this machine has: a path in the checkout is made
    relative to it, another cut to its name. ``--option=PATH`` counts as a path as well."""
    option, equals, value = argument.rpartition("=")
    path = Path(value)
    if not path.is_absolute():
        return argument
    inside = path.is_relative_to(ROOT)
    return option + equals + (path.relative_to(ROOT).as_posix() if inside else path.name)
