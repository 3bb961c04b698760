"""Choices by measurement: they compare CPU time, so that the current load does not affect them, and
are kept for the next start."""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Final, TypeVar

import torch

from worker.log import model_log

TURNS: Final = 7
"""Samples per candidate, taken alternately: two outliers do not move the median."""
CLEARLY: Final = 0.95
"""Share of the first candidate's time below which another replaces it: less is noise."""

Key = TypeVar("Key")


class KeptChoices:
    """Names chosen for a machine and a model, which ``facts`` identify, in a file in ``folder``;
    without a folder, nothing is kept. If the file is removed, the next start measures again."""

    def __init__(
        self, folder: Path | None = None, facts: Mapping[str, object] | None = None
    ) -> None:
        self._facts = json.loads(json.dumps(facts or {}, default=str))
        digest = hashlib.sha256(json.dumps(self._facts, sort_keys=True).encode()).hexdigest()
        self._file = None if folder is None else folder / f"{digest[:16]}.json"

    def kept(self, what: str, among: Iterable[str]) -> str | None:
        """The name that was chosen for ``what``, if it is still ``among`` the candidates."""
        name = self._read().get(what)
        if not isinstance(name, str) or name not in among:
            return None
        model_log.info("%s by %s, as %s says", what, name, self._file)
        return name

    def keep(self, what: str, name: str) -> None:
        if self._file is None:
            return
        partial = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            partial.write_text(json.dumps(self._read() | {what: name, "of": self._facts}, indent=1))
            partial.replace(self._file)
        except OSError as error:
            model_log.warning("the choice of %s could not be saved: %s", what, error)

    def _read(self) -> dict[str, object]:
        if self._file is not None:
            with contextlib.suppress(OSError, ValueError):
                found = json.loads(self._file.read_text())
                return found if isinstance(found, dict) else {}
        return {}


def machine_facts() -> dict[str, object]:
    """The facts that determine the speed of this machine's products."""
    name = ""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line for line in lines if line.startswith("model name")).partition(": ")[2]
    return {
        "cpu": name,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def in_turns(calls: Mapping[Key, Callable[[], float]], turns: int = TURNS) -> dict[Key, float]:
    """The median of each call's measurements, sampled alternately."""
    samples: dict[Key, list[float]] = {key: [] for key in calls}
    for _ in range(turns):
        for key, call in calls.items():
            samples[key].append(call())
    return {key: median(found) for key, found in samples.items()}


def best_of(times: Mapping[Key, float]) -> Key:
    """The fastest if it is clearly faster than the first; otherwise the first."""
    first, best = next(iter(times)), min(times, key=lambda key: times[key])
    return best if times[best] < CLEARLY * times[first] else first


def cpu_seconds(call: Callable[[], object]) -> float:
    """CPU time of ``call`` on this thread, independent of the machine's other load."""
    began = time.thread_time()
    call()
    return time.thread_time() - began


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Make torch compute only on the calling thread, so that its CPU time covers all work: with
    several threads, the split depends on which thread gets a core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
