"""Log files: bounded, for their owner only, and the one useful part of a Triton log."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from catalog.errors import LogUnusable
from pool.process import logs
from pool.process.logs import (
    KEPT_LOGS,
    bound_log,
    fresh_log,
    require_writable,
    tail,
    usable_log,
    why_triton_ended,
)
from pool.process.process import GuardedProcess, Label, command_environment, new_mark

LOAD_FAILED = r"""
I1120 19:39:40.968527 11135 model_lifecycle.cc:472] "loading: llm:1"
I1120 19:39:41.105399 11135 pb_stub.cc:366] "Failed to initialize Python stub: ValueError: no\n"
E1120 19:39:41.319937 11135 backend_model.cc:692] "ERROR: Failed to create instance: ValueError"
E1120 19:39:41.320038 11135 model_lifecycle.cc:642] "failed to load 'llm' version 1: Internal: RuntimeError: no \"cuda\" here\n  use --device cpu\n\nAt:\n  /m/llm/1/model.py(3): initialize\n"
I1120 19:39:41.320055 11135 model_lifecycle.cc:777] "failed to load 'llm'"
+-------+---------+
error: creating server: Invalid argument - load failed for model 'llm': version 1 is at UNAVAILABLE
"""  # noqa: E501

LOAD_FAILED_OLD = """
E0101 00:00:00.000000 1 a.cc:638] failed to load 'llm' version 1: Internal: KeyError: 'x'

At:
  /m/llm/1/model.py(3): initialize
"""

PORT_TAKEN = """
E1120 19:39:37.911016 11070 main.cc:245] "failed to start GRPC service: Unavailable - Socket '127.0.0.1:18101' already in use "
"""  # noqa: E501

ABORTED = """
I1123 15:01:59.948242 24611 cuda_memory_manager.cc:117] "CUDA memory pool disabled"
E1123 15:01:59.948356 24611 server.cc:241] "CudaDriverHelper has not been initialized."
I1123 15:01:59.967855 24611 model_lifecycle.cc:472] "loading: llm:1"
terminate called after throwing an instance of 'boost::interprocess::lock_exception'
  what():  boost::interprocess::lock_exception
"""

WITHOUT_A_GPU = """
E1123 15:01:59.948356 24611 server.cc:241] "CudaDriverHelper has not been initialized."
I1123 15:01:59.967855 24611 model_lifecycle.cc:472] "loading: llm:1"
"""

USAGE = """\
/opt/tritonserver/bin/tritonserver: unrecognized option '--nonsense'
Usage: tritonserver [options]
  --help
\tPrint usage
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "triton.log"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LOAD_FAILED, 'model llm: RuntimeError: no "cuda" here\n  use --device cpu'),
        (LOAD_FAILED_OLD, "model llm: KeyError: 'x'"),
        (
            PORT_TAKEN,
            "failed to start GRPC service: Unavailable - Socket '127.0.0.1:18101' already in use",
        ),
        (USAGE, "/opt/tritonserver/bin/tritonserver: unrecognized option '--nonsense'"),
        (
            ABORTED,
            "terminate called after throwing an instance of 'boost::interprocess::lock_exception'\n"
            "  what():  boost::interprocess::lock_exception",
        ),
        (WITHOUT_A_GPU, WITHOUT_A_GPU.strip()),
        ("one\n\ntwo\n", "one\ntwo"),
    ],
)
def test_says_why_in_a_few_words(log: Path, text: str, reason: str) -> None:
    fresh_log(log)
    log.write_text(text)
    assert why_triton_ended(log) == reason


def files(log: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in log.parent.iterdir()}


def test_only_so_many_runs_are_kept(log: Path) -> None:
    assert tail(log) == "", "no log is no error"
    for run in range(KEPT_LOGS + 3):
        fresh_log(log)
        assert log.read_text() == ""
        log.write_text(f"run {run}")
    kept = {f"triton.log{end}": f"run {5 - age}" for age, end in enumerate(("", ".1", ".2", ".3"))}
    assert files(log) == kept


def test_what_is_bounded_is_for_its_owner_only_and_bounded_even_if_nothing_can_be_kept(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LOG_BYTES", 1)
    fresh_log(log)
    log.write_text("so much")
    bound_log(log)
    assert log.parent.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in log.parent.iterdir()} == {0o600}
    assert len(files(log)) == 2
    log.write_text("so much")
    log.with_name("triton.log.3").mkdir()  # as good as a full disk: nothing can be moved or made
    bound_log(log)
    assert log.read_text() == ""
    log.unlink()
    bound_log(log)  # somebody took it away: nothing to bound


NOISE = """
import os, sys, time
for file, line in zip(sys.argv[1:], ("x" * 999, "last")):
    while not os.path.exists(file):
        print(line, flush=True)
        time.sleep(0.005)
"""
"""Writes one line over and over until there is a file, then another until there is another."""


async def until(done: Callable[[], bool]) -> None:
    while not done():  # noqa: ASYNC110 - what is waited for has no event of its own
        await asyncio.sleep(0.01)


async def test_what_a_process_writes_is_bounded_while_it_runs(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LOG_BYTES", 10_000)
    monkeypatch.setattr(logs, "LOOK_S", 0.01)
    fresh_log(log)
    command = [sys.executable, "-c", NOISE, str(tmp_path / "enough"), str(tmp_path / "seen")]
    label = Label("noisy", new_mark())
    process = await GuardedProcess.start(label, command, command_environment({}), log)
    await until(lambda: len(files(log)) == 1 + KEPT_LOGS)
    (tmp_path / "enough").touch()
    await until(lambda: log.read_text().endswith("last\n"))
    (tmp_path / "seen").touch()
    assert await process.wait() == 0
    bound_log(log)
    kept = files(log)
    assert len(kept) == 1 + KEPT_LOGS
    assert len(kept["triton.log"]) <= 10_000
    assert "\0" not in "".join(kept.values())  # it continues at the new beginning


def test_a_place_that_cannot_be_written_to_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(LogUnusable, match=r"logs/8080.*Not a directory.*--log-to-stderr"):
        require_writable(tmp_path / "logs" / "8080")
    warnings: list[str] = []
    assert usable_log(tmp_path / "logs" / "8080" / "a.log", warnings.append) is None
    assert len(warnings) == 1 and "until its next start it logs to stderr" in warnings[0]
    assert "--log-to-stderr" not in warnings[0]  # not every command has it
    (tmp_path / "logs").unlink()
    require_writable(tmp_path / "logs" / "8080")
    assert list((tmp_path / "logs" / "8080").iterdir()) == []
