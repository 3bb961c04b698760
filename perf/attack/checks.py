"""Checks after an attack: nothing runs, nothing is lost, nothing has grown, nothing was said."""

import asyncio
import json
import sys
from pathlib import Path

from perf.attack.target import SECRET, Tally, Target
from perf.load.usage import Usage, rss_mib
from perf.stack.scrape import scrape

IDLE_S = 60.0
"""Seconds after which work that was under way has ended, on a busy machine too."""
SETTLE_S = 1.0
GROWTH = 1.05
_FEW_FDS = 8
_FEW_MIB = 8.0
"""Growth in MiB below which a share of growth is noise."""


def sizes_of(target: Target) -> dict[str, Usage]:
    """Usage of each of the stack's processes, by part."""
    return {part: Usage.of_each([pid]) for part, pid in target.pids.items()}


class StateChecks:
    """State noted before an attack; checked behind it, which adds what does not hold to its
    tally."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._read = {log: _length(log) for log in target.logs}
        self.before = sizes_of(target)

    async def close(self, tally: Tally, *, sizes: bool = True) -> dict[str, Usage]:
        """Add faults for what does not balance; ``sizes``: growth is one. Returns the sizes now."""
        await self._balance(tally)
        after = sizes_of(self._target)
        for log in self._target.logs:
            said = _tail(log, self._read[log])
            for what in ("Traceback", "Failed to process the request", SECRET):
                if what in said:
                    at = said.index(what)
                    tally.fault(f"{log.name}: {said[max(0, at - 200) : at + 300]}")
        if sizes:
            for part, before in self.before.items():
                if part == "worker":  # its KV pool is taken from the system as it is used
                    continue
                _compare(tally, f"{part} files", before.fds, after[part].fds, _FEW_FDS)
                _compare(tally, f"{part} MiB", before.rss_mib, after[part].rss_mib, _FEW_MIB)
        return after

    async def _balance(self, tally: Tally) -> None:
        target, wrong = self._target, "nothing was read"
        for _ in range(int(IDLE_S / 0.25)):
            await asyncio.sleep(0.25)
            metrics = await scrape(target.host, target.port)
            free, total = (
                metrics.total("tidegate_kv_blocks", kind=kind) for kind in ("free", "total")
            )
            wrong = "; ".join(metrics.unbalanced())
            if not metrics.is_idle:
                wrong = "something runs or waits"
            elif free != total or not total:
                wrong = f"KV blocks: {free} free of {total}"
            if not wrong:
                await asyncio.sleep(SETTLE_S)
                return
        tally.fault(f"after {IDLE_S:g} s: {wrong}")


class HealthProbe:
    """Asks each port for ``/health/live`` fifty times a second, from a process of its own, and
    looks how large the orchestrator gets."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._ports = [port for port in (target.port, target.health_port) if port]
        self.latencies_ms: list[float] = []
        """Latencies of the main port."""
        self.port_latencies_ms: list[float] = []
        """Latencies of the health port; empty where there is none."""
        self.peak_mib = 0.0

    async def __aenter__(self) -> "HealthProbe":
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "perf.attack.health"),
            *(self._target.host, *(str(port) for port in self._ports)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self._looking = asyncio.create_task(self._look())
        return self

    async def _look(self) -> None:
        while True:
            self.peak_mib = max(self.peak_mib, rss_mib(self._target.pids["orchestrator"]))
            await asyncio.sleep(0.05)

    async def __aexit__(self, *_: object) -> None:
        self._looking.cancel()
        output = (await self._process.communicate(b""))[0]  # closes its stdin
        self.latencies_ms, *more = json.loads(output)
        self.port_latencies_ms = more[0] if more else []


def _compare(tally: Tally, what: str, before: float, after: float, few: float) -> None:
    if after > before * GROWTH and after > before + few:
        tally.fault(f"{what}: {before:.0f} before, {after:.0f} after")


def _length(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _tail(log: Path, begin: int) -> str:
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(begin if _length(log) >= begin else 0)
        return file.read().decode(errors="replace")
