"""``tidegate up --engine llamacpp``: llama.cpp's server, kept up, behind our orchestrator."""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.test_launch import Up
from tests.support.llamacpp import demo_gguf
from tests.support.processes import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_gguf_file_is_served_through_crashes_and_nothing_is_left(tmp_path: Path) -> None:
    up = Up(
        tmp_path, "--model", str(demo_gguf(tmp_path)), "--engine", "llamacpp", "--instances", "2"
    )
    try:
        assert up.generates()
        names = [each["name"] for each in up.state["instances"]]
        assert names == ["llamacpp-0", "llamacpp-1"], "and no Triton"
        before = up.instance("llamacpp-0")
        os.kill(before["pid"], signal.SIGKILL)
        eventually(
            lambda: up.instance("llamacpp-0")["pid"] not in (None, before["pid"]), lambda: up.output
        )
        assert up.instance("llamacpp-0")["http_port"] == before["http_port"]
        os.kill(up.instance("llamacpp-1")["pid"], signal.SIGKILL)
        eventually(up.generates, lambda: up.output)
        up.end(signal.SIGINT)
    finally:
        for pid in up.marked.pids():
            os.kill(pid, signal.SIGKILL)
