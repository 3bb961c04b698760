"""Where tests of triton's kernels run: compiled on CUDA, else under triton's interpreter."""

import os
from collections.abc import Iterator

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
NEEDS_TRITON = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="needs a CUDA device, or triton's interpreter: see test_interpreted.py",
)


@pytest.fixture(autouse=True, scope="module")
def sound_interpreter() -> Iterator[None]:
    if not INTERPRETED:
        yield
        return
    from tests.support.interpreter import repaired

    with repaired():
        yield
