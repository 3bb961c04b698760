"""``tidegate up --engine llamacpp``: llama.cpp's server, kept up, behind our orchestrator."""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.test_launch import Up
from tests.support.llamacpp import demo_gguf
from tests.support.processes import Marked, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_gguf_file_is_served_through_crashes_and_nothing_is_left(
    tmp_path: Path, marks: list[Marked]
) -> None:
    model = str(demo_gguf(tmp_path))
    up = Up(marks, tmp_path, "--model", model, "--engine", "llamacpp", "--instances", "2")
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
