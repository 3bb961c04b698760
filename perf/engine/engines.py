"""``--engine``: several engines on the demo model, side by side and in turns."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

import msgspec

from perf.engine.child import Absent, Order, Ready
from perf.engine.contestants import CONTESTANTS, Contestant
from perf.report.bundle import BenchResult, Figure
from perf.report.command import Skip, result
from perf.report.recording import ROOT
from protocol import ModelCard

DEMO: Final = ROOT / "worker" / "demo_model" / "checkpoint"
_PROMPT_TOKENS: Final = 32
_MAX_RUNNING: Final = 32
_ENDLESS: Final = 1000


class Child:
    """An engine's process. Raises ``Skip`` where it cannot be had here."""

    def __init__(self, contestant: Contestant, device: str) -> None:
        settings = {"device": device, "max_running": _MAX_RUNNING}
        settings |= dict(contestant.settings)
        self.name = contestant.name
        self._process = subprocess.Popen(
            [
                str(contestant.python),
                "-m",
                "perf.engine.child",
                contestant.name,
                str(DEMO),
                json.dumps(settings),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env=contestant.environment | {"PYTHONPATH": str(ROOT)},
        )
        self.card: ModelCard | None = None

    def wait_ready(self) -> ModelCard:
        """Wait until the engine is loaded; returns its card. Raises ``Skip`` where it cannot be."""
        said: Ready | Absent = msgspec.json.decode(self._line(), type=Ready | Absent)
        if isinstance(said, Absent):
            raise Skip(said.why)
        return said.card

    def measure(self, order: Order) -> list[float]:
        """Carry out ``order`` while the other engines do nothing; returns the numbers measured."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._line(), type=list[float])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.name} ended with {self._process.wait()}")
        return line


def compare(
    names: Sequence[str], device: str, *, repeats: int, new_tokens: int
) -> tuple[list[BenchResult], ModelCard]:
    """Compare engines: a result for each, and the card of the first that could be loaded.

    Raises ``RuntimeError`` where none could.
    """
    with ExitStack() as stack:
        results: list[BenchResult] = []
        ready: dict[str, tuple[Child, ModelCard]] = {}
        for name in names:
            with result(results, f"engines.{name}", _what(name)):
                child = stack.enter_context(_started(CONTESTANTS[name], device))
                ready[name] = child, child.wait_ready()
        if not ready:
            raise RuntimeError(f"none of these engines is installed here: {', '.join(names)}")
        speeds, aborts = _in_turns([child for child, _ in ready.values()], repeats, new_tokens)
    figures = {name: _figures(name, speeds[name], aborts[name]) for name in ready}
    return [
        msgspec.structs.replace(one, figures=figures.get(one.name.removeprefix("engines."), []))
        for one in results
    ], next(iter(ready.values()))[1]


def _in_turns(
    children: list[Child], repeats: int, new_tokens: int
) -> tuple[dict[str, dict[int, list[float]]], dict[str, list[float]]]:
    """Tokens per second by number of streams, and abort latencies in ms; the first round warms
    up."""
    speeds: dict[str, dict[int, list[float]]] = {one.name: {} for one in children}
    aborts: dict[str, list[float]] = {one.name: [] for one in children}
    for repeat in range(repeats + 1):
        for streams in (1, 8, 32):
            for child in children:
                got = child.measure(Order(streams, _PROMPT_TOKENS, new_tokens))
                if repeat:
                    speeds[child.name].setdefault(streams, []).extend(got)
        for child in children:
            got = child.measure(Order(8, _PROMPT_TOKENS, _ENDLESS, aborts=True))
            if repeat:
                aborts[child.name] += got
    return speeds, aborts


def _figures(name: str, speeds: dict[int, list[float]], aborts: list[float]) -> list[Figure]:
    figures = [
        Figure.of(
            f"engines.{name}.b{streams}.tokens_per_s",
            f"{name}, {streams} streams" if streams > 1 else f"{name}, 1 stream",
            "tokens/s",
            samples,
            better="higher",
        )
        for streams, samples in speeds.items()
    ]
    key, label = f"engines.{name}.abort_ms", f"{name}: cancel to slot free, 8 streams"
    return [*figures, Figure.of(key, label, "ms", aborts, spread="p5–p95")]


@contextmanager
def _started(contestant: Contestant, device: str) -> Iterator[Child]:
    child = Child(contestant, device)
    try:
        yield child
    finally:
        child.close()


def _what(name: str) -> str:
    return f"The engine {name} on the demo model in float32, in turns with the others."
