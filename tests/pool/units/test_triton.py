"""One real Triton: started, lost in every way, ended; and nothing left each time (OR-14, PV-1)."""

import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from catalog.errors import StartFailed
from catalog.paths import state_dir
from pool import supervise
from pool.engines.triton import TritonInstall, TritonPorts, TritonSpec, find_triton
from pool.process.ports import free_ports
from pool.units import triton as instance_module
from pool.units.triton import TritonInstance
from tests.support.processes import Marked
from tests.support.triton_models import CRASHES, QUIET, write_model

pytestmark = pytest.mark.e2e


class Run:
    """Makes instances whose processes are told from everyone else's."""

    def __init__(self, tmp_path: Path, marked: Marked) -> None:
        self.marked = marked
        self._tmp_path = tmp_path
        self.repository = tmp_path / "models"
        self._made: list[TritonInstance] = []
        self.warnings: list[str] = []

    def make(
        self,
        source: str,
        *,
        install: TritonInstall | None = None,
        metrics_port: int = 0,
    ) -> TritonInstance:
        repository = write_model(self.repository, "tiny", source)
        http, grpc_port, metrics = free_ports(3)
        made = TritonInstance(
            "triton",
            install or find_triton(None, state_dir()),
            TritonSpec(repository, ("tiny",), env=self.marked.mark, load_timeout_s=60.0),
            TritonPorts(http, grpc_port, metrics_port or metrics),
            log=self._tmp_path / "triton.log",
            warn=self.warnings.append,
        )
        self._made.append(made)
        return made

    async def close(self) -> None:
        for each in self._made:
            await each.stop(0.0)


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    run = Run(tmp_path, Marked())
    yield run
    await run.close()


def pids_of(instance: TritonInstance) -> tuple[int, int]:
    described = instance.describe()
    (stub,) = described["stub_pids"]
    return described["pid"], stub


async def test_a_model_whose_process_cannot_be_started_is_told_at_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton would wait for it until the load timeout."""
    monkeypatch.setattr(instance_module, "_UNNOTICED_S", 0.2)
    installed = find_triton(None, state_dir())
    backend = tmp_path / "backends" / "python"
    backend.mkdir(parents=True)
    for file in (installed.backend_dir / "python").iterdir():
        (backend / file.name).symlink_to(file)
    stub = backend / "triton_python_backend_stub"
    stub.unlink()
    stub.write_text("#!/nowhere\n")
    stub.chmod(0o755)
    triton = run.make(QUIET, install=replace(installed, backend_dir=tmp_path / "backends"))
    with pytest.raises(StartFailed, match=r"ended:\na model's .* be started: .*_stub: "):
        await triton.start()
    await triton.stop(0.0)
    run.marked.wait_gone(set())


async def test_a_server_that_lacks_one_of_its_ports_was_never_started(run: Run) -> None:
    """It serves gRPC before it finds the last of its ports taken, and then ends."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        triton = run.make(QUIET, metrics_port=holder.getsockname()[1])
        with pytest.raises(StartFailed, match=r"(?i)failed to start Metrics service.*in use"):
            await triton.start()
        await triton.stop(0.0)


async def test_a_server_that_hangs_misses_its_heartbeats(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(instance_module, "_ASK_S", 0.2)
    triton = run.make(QUIET)
    await triton.start()
    regions = run.marked.regions()
    os.kill(pids_of(triton)[0], signal.SIGSTOP)
    assert "heartbeats" in await triton.lost()
    await triton.stop(0.0)
    run.marked.wait_gone(regions)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
async def test_a_server_that_crashes_while_it_starts_is_started_once_more(
    run: Run, tmp_path: Path, times: int
) -> None:
    starts = tmp_path / "starts"
    triton = run.make(CRASHES.format(starts=str(starts), times=times))
    crashed = f"triton ended with status {128 + signal.SIGABRT}:"
    with nullcontext() if times == 1 else pytest.raises(StartFailed, match=crashed):
        await triton.start()
    (warning,) = run.warnings
    assert warning.startswith(crashed) and "once more (the name of its earlier log" in warning
    assert (tmp_path / "triton.log.1").exists()
    assert len(starts.read_text().splitlines()) == 2
    regions = run.marked.regions()
    await triton.stop(0.0)
    run.marked.wait_gone(regions)
