"""The kernels compiled for GPUs that are not here: types, shapes and shared memory hold.

triton brings its own assembler, so this needs no GPU. What runs is left to ``test_triton.py``.
"""

import os
import re
from pathlib import Path

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import torch

from tests.support.compiled_kernels import attention_launches, usage_of

pytestmark = pytest.mark.slow

SHARED_BYTES = {89: 99 * 1024, 90: 227 * 1024}
"""What one program may have by compute capability (CUDA's programming guide)."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    ("dtype", "shared", "dim", "capability"),
    [(torch.bfloat16, 4, 128, 90), (torch.float16, 7, 256, 89), (torch.float32, 4, 128, 90)],
    ids=str,
)
def test_decodes_and_chunks_compile(
    dtype: torch.dtype, shared: int, dim: int, capability: int
) -> None:
    launches = attention_launches(dtype, dim, shared, is_large=capability == 90)
    calls = {name: len(launch.calls) for name, launch in launches.items()}
    assert calls == {"attend": 3, "combine": 2, "share_out": 1}
    for kernel, spills in zip(launches["attend"].compiled(capability), (0, 64, 0), strict=True):
        usage = usage_of(kernel)
        assert usage.shared_bytes <= SHARED_BYTES[capability]
        # The tiles of chunks take every register that there is, and a few more.
        assert usage.spilled_bytes <= spills
        ptx = kernel.asm["ptx"]  # type: ignore[attr-defined]
        if dtype is not torch.float32:
            assert re.search(r"\bw?gmma|\bmma\.sync", ptx), "no matrix unit is used"
        assert re.search(r"cp\.async\.cg|ld\.global\S*v4", ptx), "keys are read in small pieces"
    for name in ("combine", "share_out"):
        for kernel in launches[name].compiled(capability):
            assert usage_of(kernel).spilled_bytes == 0
