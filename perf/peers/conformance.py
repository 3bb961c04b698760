"""What a deadline means at each server, by the rules of ``tools.conformance``.

One server after the other, alone on the machine but for this client, on the same checkpoint with
the same number of requests at once. A server is told of deadlines where its documentation has a
way to say them; elsewhere its clients hang up.
"""

import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from catalog.paths import DEMO_CHECKPOINT, state_dir
from perf.load.connection import HOST
from perf.peers import servers
from perf.peers.installs import LITELLM, VLLM
from perf.report.bundle import Better, Bundle, Figure
from perf.report.command import Skip
from perf.report.machine import output_of, versions
from perf.stack.stack import StackSpec, running
from pool.engines.environments import environment_if_made
from tests.support.to_gguf import convert
from tools.conformance.budget import Effort
from tools.conformance.report import Report
from tools.conformance.run import examine
from tools.conformance.target import HANG_UP, Target, read_saying

FULL: Final = Effort(most_streams=servers.SLOTS, seconds=300.0)
QUICK: Final = Effort(rounds=1, most_streams=32, seconds=120.0)


class _Shown(NamedTuple):
    figure: str
    label: str
    unit: str
    better: Better


_SHOWN: Final = {
    "overload.met": _Shown("met", "share met at twice the capacity", "", "higher"),
    "overload.waste": _Shown("waste", "share of tokens wasted there", "", "lower"),
    "expiry.stream": _Shown("late_ms", "a stream's end after its deadline", "ms", "lower"),
}
"""Findings with a figure that goes into the bundle's table, by rule."""


class ConformanceBundle(Bundle, frozen=True, kw_only=True):
    """Bundle with the whole report of each server, by the server's name."""

    reports: dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server that runs can be asked, and what its model is called there."""

    port: int
    model: str = servers.MODEL
    pid: int | None = None
    """The process whose SIGTERM is the server's planned stop; None where it has no process of its
    own."""

    @property
    def drain(self) -> tuple[str, ...]:
        """Command that begins a planned stop, as a supervisor or a kubelet does it."""
        return () if self.pid is None else ("sh", "-c", f"kill -TERM {self.pid}")


@dataclass(frozen=True, slots=True)
class Contender:
    """One server to test; ``start`` runs it. ``version`` is that of its package, read once it
    is installed."""

    name: str
    label: str
    start: Callable[[], AbstractAsyncContextManager[Address]]
    version: Callable[[], str]
    deadline: str = HANG_UP
    absolute: str = ""
    partial: Mapping[str, object] = field(default_factory=dict)

    async def report(self, effort: Effort) -> Report:
        """Start it and test it. Raises ``Skip`` where it does not start, ``Unusable``."""
        async with self.start() as address:
            target = Target(
                url=f"http://{HOST}:{address.port}/v1",
                model=address.model,
                deadline=read_saying(self.deadline),
                absolute=read_saying(self.absolute) if self.absolute else None,
                partial=self.partial,
                drain=address.drain,
            )
            return await examine(target, effort)

    def told(self, report: Report) -> dict[str, Any]:
        """A report for a bundle: without the port, with the names by which readers know it."""
        more = {"label": self.label, "package_version": self.version()}
        return {key: value for key, value in report.json().items() if key != "url"} | more

    def figures(self, report: Report) -> list[Figure]:
        """The findings that are figures."""
        figures = []
        for each in report.findings:
            shown = _SHOWN.get(each.rule)
            if shown is not None and shown.figure in each.figures:
                key, label = f"conformance.{self.name}.{each.rule}", f"{self.label}, {shown.label}"
                sample = [each.figures[shown.figure]]
                figures.append(Figure.of(key, label, shown.unit, sample, better=shown.better))
        return figures


@asynccontextmanager
async def _tidegate() -> AsyncIterator[Address]:
    spec = StackSpec(max_running=servers.SLOTS, model=DEMO_CHECKPOINT, model_name=servers.MODEL)
    async with running(spec) as stack:
        yield Address(stack.port, pid=stack.orchestrator.pid)


@asynccontextmanager
async def _vllm(*, install: bool) -> AsyncIterator[Address]:
    await VLLM.install(allowed=install)
    async with servers.vllm(DEMO_CHECKPOINT) as served:
        yield Address(served.port, pid=next(iter(served.pids.values())))


@asynccontextmanager
async def _llamacpp() -> AsyncIterator[Address]:
    with tempfile.TemporaryDirectory(prefix="tidegate-perf-") as folder:
        file = Path(folder) / "demo.gguf"
        convert(DEMO_CHECKPOINT, file, "f32")
        async with servers.llamacpp(_llamacpp_python(), file) as port:
            # It runs in a program of ours (pool/engines/llamacpp_server.py), which no signal
            # drains.
            yield Address(port, file.name)


def _llamacpp_python() -> str:
    """The Python of the engine's environment. Raises ``Skip`` where there is none."""
    made = environment_if_made("llamacpp", state_dir()).get("VIRTUAL_ENV")
    if made is None:
        raise Skip("llama.cpp is not installed here: tidegate engines ensure llamacpp")
    return f"{made}/bin/python"


@asynccontextmanager
async def _litellm(*, install: bool) -> AsyncIterator[Address]:
    await LITELLM.install(allowed=install)
    async with AsyncExitStack() as stack:
        behind = await stack.enter_async_context(_llamacpp())
        model = f"openai/{behind.model}"
        proxy = await stack.enter_async_context(servers.litellm(behind.port, model))
        yield Address(proxy.port, model, proxy.pid)


def _version_of_llamacpp() -> str:
    asked = "from importlib.metadata import version; print(version('xllamacpp'))"
    return output_of(_llamacpp_python(), "-c", asked)


def contenders(*, install: bool) -> tuple[Contender, ...]:
    """Servers to test; ``install``: what is not there may be installed."""
    return (
        Contender(
            "tidegate",
            "Tidegate",
            _tidegate,
            lambda: versions().get("tidegate", ""),
            deadline="X-Timeout-Ms: {ms}",
            absolute="X-Deadline: {unix_ms}",
            partial={"on_deadline": "partial"},
        ),
        Contender("vllm", "vLLM", lambda: _vllm(install=install), lambda: VLLM.version),
        Contender("llamacpp", "llama.cpp's server", _llamacpp, _version_of_llamacpp),
        Contender(
            "litellm",
            "LiteLLM before llama.cpp's server",
            lambda: _litellm(install=install),
            lambda: LITELLM.version,
            deadline="x-litellm-timeout: {s}",
        ),
    )
