"""Stacks for benchmarks: servers on free loopback ports, which end with the benchmark."""

import json
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from catalog.paths import DEMO_CHECKPOINT, MODEL_REPOSITORY, state_dir
from perf.load.connection import HOST
from perf.stack.constants import repository_with, with_constants
from pool.engines.triton import TritonPorts, TritonSpec, find_triton
from pool.process.ports import free_ports
from pool.units.orchestrator import OrchestratorProcess
from pool.units.triton import TritonInstance
from protocol.tensors import MODEL_NAME
from worker.settings import EngineName

READY_S = 60.0
_LOAD_S = 120.0


@dataclass(frozen=True, slots=True)
class StackSpec:
    """Settings of a stack: engine and model behind the orchestrator; ``…_ms`` are of
    ``synthetic-paced``."""

    engine: EngineName = "torch"
    device: str = "cpu"
    step_ms: float = 20.0
    row_ms: float = 0.0
    prompt_token_ms: float = 0.0
    lengths: Literal["cap", "prompt"] = "cap"
    """End of synthetic answers: at the ``cap``, or as the ``prompt`` says."""
    max_running: int = 64
    """0 leaves the number to the worker."""
    kv_blocks: int = 0
    """Blocks of the worker's KV pool; 0 leaves the number to the worker."""
    deterministic: bool = False
    """Whether a job gets the same tokens whatever runs with it."""
    model: Path = DEMO_CHECKPOINT
    model_name: str = "demo"
    with_health_port: bool = False
    """Whether the orchestrator answers health checks on a port of their own too."""
    slow_file: str = ""
    """File that slows the engine's steps while it is there (``worker.runner.synthetic``)."""
    more: Mapping[str, str] = field(default_factory=dict)
    """Further variables of the worker's environment."""
    constants: Mapping[str, object] = field(default_factory=dict)
    """Constants of the worker (``perf.stack.constants``)."""

    @property
    def _is_made_up(self) -> bool:
        return self.engine.startswith("synthetic")

    def _arguments(self) -> str:
        stated = {
            "step_ms": self.step_ms,
            "row_ms": self.row_ms,
            "prompt_token_ms": self.prompt_token_ms,
            "lengths": self.lengths,
        }
        return json.dumps(stated | ({"slow_file": self.slow_file} if self.slow_file else {}))

    def worker_env(self) -> dict[str, str]:
        return {
            "TIDEGATE_WORKER__MODEL_PATH": str(self.model),
            "TIDEGATE_WORKER__MODEL_NAME": self.model_name,
            "TIDEGATE_WORKER__ENGINE": self.engine,
            "TIDEGATE_WORKER__DEVICE": self.device,
            **({"TIDEGATE_WORKER__ENGINE_ARGS": self._arguments()} if self._is_made_up else {}),
            **({"TIDEGATE_WORKER__DETERMINISTIC": "true"} if self.deterministic else {}),
            **({"TIDEGATE_WORKER__MAX_RUNNING": str(self.max_running)} if self.max_running else {}),
            "TIDEGATE_WORKER__KV__BLOCKS": str(self.kv_blocks),
            **self.more,
        }


@dataclass(frozen=True, slots=True)
class Stack:
    """A Triton and an orchestrator that serve."""

    triton: TritonInstance
    orchestrator: OrchestratorProcess
    triton_version: str
    health_port: int
    """Port for health checks; 0 where there is none."""

    @property
    def port(self) -> int:
        """Port of the orchestrator."""
        return self.orchestrator.port

    @property
    def grpc_address(self) -> str:
        return self.triton.grpc_address

    def pids(self) -> dict[str, int]:
        """Process ids by part: orchestrator, Triton's server, the worker in its stub."""
        return {
            "orchestrator": alive(self.orchestrator.pid),
            "triton": server_of(self.triton),
            "worker": stubs_of(self.triton)[0],
        }


@asynccontextmanager
async def running(spec: StackSpec) -> AsyncIterator[Stack]:
    """Run a stack during the body. Raises ``ProvisionError`` when it cannot be started."""
    health_port = free_ports(1)[0] if spec.with_health_port else 0
    env = {"TIDEGATE_HEALTH__PORT": str(health_port)} if health_port else {}
    async with (
        tritons(spec, 1) as (worker,),
        orchestrating([worker.grpc_address], env) as orchestrator,
    ):
        yield Stack(worker, orchestrator, find_triton(None, state_dir()).version, health_port)


@asynccontextmanager
async def tritons(spec: StackSpec, count: int) -> AsyncIterator[list[TritonInstance]]:
    """Run ``count`` Tritons alike. Raises ``ProvisionError`` when one cannot be started."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                triton(
                    f"triton-{number}",
                    MODEL_NAME,
                    spec.worker_env(),
                    spec.constants,
                )
            )
            for number in range(count)
        ]


@asynccontextmanager
async def triton(
    name: str,
    model: str,
    env: Mapping[str, str],
    constants: Mapping[str, object] | None = None,
) -> AsyncIterator[TritonInstance]:
    """Run a Triton that serves ``model`` of our repository, with these ``constants``; ``name`` is
    that of its log, too.

    Raises ``ProvisionError`` when it cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="tidegate-models-") as folder:
        repository = repository_with(constants, Path(folder)) if constants else MODEL_REPOSITORY
        instance = TritonInstance(
            name,
            find_triton(None, state_dir()),
            TritonSpec(repository, (model,), env=env, load_timeout_s=_LOAD_S),
            TritonPorts(*free_ports(3)),
            log=state_dir() / "perf" / f"{name}.log",
        )
        try:
            await instance.start()
            yield instance
        finally:
            await instance.stop(0.0)


@asynccontextmanager
async def orchestrating(
    addresses: Sequence[str],
    env: Mapping[str, str],
    name: str = "orchestrator",
    constants: Mapping[str, object] | None = None,
) -> AsyncIterator[OrchestratorProcess]:
    """Run an orchestrator in front of ``addresses``, ready; ``env`` are more ``TIDEGATE_…``, and
    ``constants`` are set there (``perf.stack.constants``)."""
    process = OrchestratorProcess(
        HOST,
        free_ports(1)[0],
        {"TIDEGATE_INSTANCES": ",".join(addresses), "TIDEGATE_TOKEN": "", **env},
        log=state_dir() / "perf" / f"{name}.log",
        command=with_constants(constants or {}),
    )
    try:
        await process.start()
        await process.wait_ready(READY_S)
        yield process
    finally:
        await process.stop(0.0)


@asynccontextmanager
async def emitter_server(*arguments: str) -> AsyncIterator[OrchestratorProcess]:
    """Run ``perf.stack.emitter`` with these ``arguments``."""
    port = free_ports(1)[0]
    process = OrchestratorProcess(
        HOST,
        port,
        {},
        log=state_dir() / "perf" / f"emitter-{port}.log",
        command=(sys.executable, "-m", "perf.stack.emitter", str(port), *arguments),
    )
    try:
        await process.start()
        yield process
    finally:
        await process.stop(0.0)


def alive(pid: int | None) -> int:
    assert pid is not None, "it is not running"
    return pid


def server_of(triton: TritonInstance) -> int:
    return alive(triton.pid)


def stubs_of(triton: TritonInstance) -> list[int]:
    return cast("list[int]", triton.describe()["stub_pids"])
