"""Threads for work that must not delay the engine."""

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from worker.log import engine_log

Task = Callable[[], None]


class Background(Protocol):
    """Runs tasks one after the other, somewhere else. Tests run them by hand."""

    def submit(self, task: Task) -> None: ...

    def close(self, grace_s: float) -> None:
        """Accept no more tasks; allow those left ``grace_s`` seconds. Idempotent."""


class BackgroundThread:
    """A ``Background`` on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._closed = False
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, task: Task) -> None:
        """Run ``task`` on the thread, which the first call starts: it inherits its maker's
        niceness, and that of a load would stay."""
        if not self._closed:
            if self._thread.ident is None:
                self._thread.start()
            self._tasks.put(task)

    def close(self, grace_s: float) -> None:
        if not self._closed:
            self._closed = True
            if self._thread.ident is not None:
                self._tasks.put(None)
                self._thread.join(grace_s)
            self._abandoned = True

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None and not self._abandoned:
            try:
                task()
            except Exception:
                engine_log.exception("background task of %s failed", self._thread.name)
