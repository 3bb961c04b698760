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

from tests.support.compile_kernels import Launch
from worker.attention import KVPool
from worker.attention.triton_backend import TritonAttention

pytestmark = pytest.mark.slow

SHARED_BYTES = {89: 99 * 1024, 90: 227 * 1024}
"""What one program may have by compute capability (CUDA's programming guide)."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    ("dtype", "shared", "dim", "capability"),
    [
        (torch.bfloat16, 4, 128, 90),
        (torch.float16, 7, 256, 89),
        (torch.float32, 4, 128, 90),
    ],
    ids=str,
)
def test_decodes_and_chunks_compile(
    dtype: torch.dtype, shared: int, dim: int, capability: int
) -> None:
    import numpy as np

    from worker.attention.trial import make_trial

    pool = KVPool(
        layers=1,
        blocks=80,
        block_tokens=16,
        kv_heads=2,
        head_dim=dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    backend = TritonAttention(pool, 2 * shared, windows=(100,))
    kernels = backend._kernels
    launches = Launch(kernels.attend), Launch(kernels.combine), Launch(kernels.share_out)

    class Recording:
        attend, combine, share_out = launches

    backend._kernels = Recording  # type: ignore[assignment]
    # A split decode and a chunk; then decodes of lengths that only the device knows.
    trial = make_trial(pool, 2 * shared, [600], [(20, 40)], np.random.default_rng(0))
    backend.prepare(trial.batch).attend(0, trial.queries, trial.keys_values)
    one = trial.batch.block_table[:1]
    table, contexts = torch.from_numpy(one.astype(np.int32)), torch.ones(1, dtype=torch.int32)
    fixed = backend.decode_step(torch.zeros(1, dtype=torch.int64), table, contexts, 600)
    fixed.attend(0, trial.queries[:1], trial.keys_values[:1])
    assert [len(launch.calls) for launch in launches] == [3, 2, 1]
    for kernel in launches[0].compiled(capability):
        assert kernel.metadata.shared <= SHARED_BYTES[capability]  # type: ignore[attr-defined]
        ptx = kernel.asm["ptx"]  # type: ignore[attr-defined]
        if dtype is not torch.float32:
            assert re.search(r"\bw?gmma|\bmma\.sync", ptx), "no matrix unit is used"
        assert re.search(r"cp\.async\.cg|ld\.global\S*v4", ptx), "keys are read in small pieces"
    assert launches[1].compiled(capability) and launches[2].compiled(capability)
