"""Measures a worker's speed from outside, for servers that do not report it.

Engines that batch give each running stream a token per step. So within a short window the stream
with most tokens counts the steps, and the time in which any job was there is the time that they
took. It includes the way to the server and the server's own queue, as a job there will meet too.
"""

from protocol import WorkerStats


class LaneMeter:
    """Counts one lane's jobs and tokens. Times are seconds of the clock."""

    def __init__(self) -> None:
        self._window: dict[int, int] = {}
        """Tokens of each running job since the last report."""
        self._busy_since: float | None = None
        self._busy_s = 0.0
        """Seconds with a running job, in this window and earlier ones without a token."""
        self._steps_total = 0
        self._busy_ms_total = 0.0
        self._prompt_tokens_total = 0
        self._tokens_total = 0
        self._jobs_total = 0
        self._step_ms = 0.0
        self._foreign = 0
        self._foreign_before = 0

    def begin(self, handle: int, now: float) -> None:
        if not self._window:
            self._busy_since = now
        self._window[handle] = 0
        self._jobs_total += 1

    def first_token(self, prompt_tokens: int) -> None:
        """Count a job's first token: its prompt was computed."""
        self._prompt_tokens_total += prompt_tokens

    def tokens(self, handle: int, count: int) -> None:
        self._tokens_total += count
        if handle in self._window:
            self._window[handle] += count

    def end(self, handle: int, now: float) -> None:
        steps = self._window.pop(handle, 0)
        if steps > max(self._window.values(), default=0):
            self._close_window(steps, now)
        if not self._window and self._busy_since is not None:
            self._busy_s += now - self._busy_since
            self._busy_since = None

    def saw_others(self, jobs: int) -> None:
        """Record how many other jobs the server reports; only what it reports twice counts."""
        self._foreign, self._foreign_before = min(jobs, self._foreign_before), jobs

    def report(self, now: float) -> WorkerStats:
        steps = max(self._window.values(), default=0)
        if steps:
            self._close_window(steps, now)
        return WorkerStats(
            kv_blocks_total=0,
            kv_blocks_used=0,
            kv_blocks_free=0,
            running=len(self._window) + self._foreign,
            waiting=0,
            step_ms=self._step_ms,
            tokens_total=self._tokens_total,
            late_tokens_total=0,
            jobs_total=self._jobs_total,
            check_us=0.0,
            lanes=1,
            steps_total=self._steps_total,
            busy_ms_total=self._busy_ms_total,
            prefill_tokens_total=self._prompt_tokens_total,
        )

    def _close_window(self, steps: int, now: float) -> None:
        busy_s = self._busy_s
        if self._busy_since is not None:
            busy_s += now - self._busy_since
            self._busy_since = now
        self._busy_s = 0.0
        self._window = dict.fromkeys(self._window, 0)
        self._steps_total += steps
        self._busy_ms_total += 1000 * busy_s
        self._step_ms = 1000 * busy_s / steps
