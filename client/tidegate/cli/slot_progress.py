"""Shows how far a slot is: a bar for each stage in a terminal, else a line as each is done."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed

from tidegate import _clock
from tidegate.cli.terminal import console, duration
from tidegate.slots import SlotQueued, SlotStage

STAGES: Final = {"audio": "speech", "image": "portrait", "video": "video", "clip": "check"}
"""Names of the stages for people."""


class View(Protocol):
    """A display that is told of a slot's progress."""

    def queued(self, event: SlotQueued) -> None: ...

    def stage(self, event: SlotStage) -> None: ...

    def done(self) -> None: ...


@contextmanager
def open_progress() -> Iterator[View]:
    """Open a progress display on stderr: stdout is for the answer."""
    out = console(to_stderr=True)
    if not out.is_terminal:
        yield _Lines(out)
        return
    bars = _Bars(out)
    with bars.progress:
        yield bars


class _Lines:
    def __init__(self, out: Console) -> None:
        self._out = out
        self._began = _clock.now()
        self._done: set[str] = set()

    def queued(self, event: SlotQueued) -> None:
        if event.queue_position or event.predicted_ms is not None:
            self._out.print(_expected(event))

    def stage(self, event: SlotStage) -> None:
        if event.percent >= 100 and event.stage not in self._done:
            self._done.add(event.stage)
            took = duration(1000 * (_clock.now() - self._began))
            self._out.print(f"{STAGES.get(event.stage, event.stage)} done after {took}")

    def done(self) -> None:
        pass  # the answer says it


class _Bars:
    def __init__(self, out: Console) -> None:
        self._out = out
        self._bars: dict[str, TaskID] = {}
        columns = (
            TextColumn("{task.description:<9}"),
            BarColumn(),
            TaskProgressColumn(),
            Elapsed(),
        )
        self.progress = Progress(*columns, console=out)

    def queued(self, event: SlotQueued) -> None:
        if event.queue_position or event.predicted_ms is not None:
            self._out.print(_expected(event), style="dim")
        for stage, title in STAGES.items():
            self._bars[stage] = self.progress.add_task(title, total=100, start=False)

    def stage(self, event: SlotStage) -> None:
        bar = self._bars.get(event.stage)
        if bar is None:
            bar = self._bars[event.stage] = self.progress.add_task(event.stage, total=100)
        self.progress.start_task(bar)
        self.progress.update(bar, completed=event.percent)

    def done(self) -> None:
        for bar in self.progress.tasks:
            if bar.started:  # the last stage's end is the result
                self.progress.update(bar.id, completed=100)


def _expected(event: SlotQueued) -> str:
    parts = []
    if event.queue_position:
        parts.append(f"{event.queue_position} before it")
    if event.predicted_ms is not None:
        parts.append(f"expected in {duration(event.predicted_ms)}")
    return "queued: " + ", ".join(parts)
