"""OR-14: what is asked of the process before it serves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HANGS_UP = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "orchestrator.settings":
            os.kill(os.getpid(), signal.SIGHUP)

sys.meta_path.insert(0, Finder())
"""
"""SIGHUP comes while the orchestrator's modules are imported."""


@pytest.mark.slow
def test_sighup_while_it_starts_is_a_reload_once_it_serves(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HANGS_UP)
    with subprocess.Popen(
        [sys.executable, "-m", "orchestrator", "--port", "0", "--instances", "127.0.0.1:1"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if "settings reloaded" in line:
                process.terminate()
        assert process.wait() == 0, "".join(said)
    assert "settings reloaded" in "".join(said)
