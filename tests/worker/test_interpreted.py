"""Triton's kernels under its interpreter, without a GPU.

It is told by the environment before it is imported: one process runs all such tests.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent
TESTS = [
    "attention/test_triton.py",
    "models/test_fused.py::test_interpreted",
    "sampling/test_triton_draws.py",
]


@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_what_is_compiled_elsewhere_is_right_as_plain_python() -> None:
    """Every backend against the reference on random shapes (issue 3)."""
    options = ["-q", "-x", "-rs", "-p", "no:cacheprovider", "--timeout", "600"]
    interpreted = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(str(FOLDER / test) for test in TESTS)],
        env=os.environ | interpreted,
        cwd=FOLDER.parents[1],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout, run.stdout[-500:]
    assert "skipped" not in run.stdout, run.stdout[-2000:]
