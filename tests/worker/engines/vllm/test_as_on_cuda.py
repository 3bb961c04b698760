"""vLLM's adapter with what vLLM has on CUDA: its second model runner, and steps that overlap.

Its kernels run by triton's interpreter, which the environment decides before they are imported: one
process runs all of these tests.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.vllm_on_cuda import is_interpreted

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[3]


@pytest.mark.timeout(1800)
def test_every_promise_holds_with_the_second_runner() -> None:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here: make test-engines")
    if is_interpreted():
        pytest.skip("this is the process that it starts")
    tests = [FOLDER / "test_pauses.py", FOLDER.parent / "test_every_engine.py"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-rs", "-k", "vllm", *map(str, tests)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout, run.stdout[-500:]
