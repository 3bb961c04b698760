"""The real server of llama.cpp, where it is installed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from catalog.paths import DEMO_CHECKPOINT, state_dir
from pool.engines.environments import environment_if_made
from pool.process.ports import free_ports
from pool.units.llamacpp import ENGINE, LlamaCppServer
from tests.support.stack import LoopThread


def skip_without_llamacpp() -> None:
    if not environment_if_made(ENGINE, state_dir(), "cpu"):
        pytest.skip("llama.cpp's server is not installed here: make test-llamacpp")


def demo_gguf(folder: Path) -> Path:
    """The demo checkpoint as float32."""
    skip_without_llamacpp()
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    from tests.support.to_gguf import convert

    convert(DEMO_CHECKPOINT, folder / "demo.gguf", "f32")
    return folder / "demo.gguf"


@contextmanager
def llamacpp_server(model: Path, log: Path, **settings: str) -> Iterator[LlamaCppServer]:
    """One on ``model``, on the CPU."""
    skip_without_llamacpp()
    told = {"model_path": str(model), "device": "cpu"} | settings
    variables = {f"TIDEGATE_WORKER__{name.upper()}": value for name, value in told.items()}
    loop = LoopThread()
    server = LlamaCppServer("llamacpp", variables, state_dir(), free_ports(1)[0], log=log)
    try:
        loop.run(server.start())
        yield server
    finally:
        loop.run(server.stop(0.0))
        loop.close()
