"""Copies between a pool and staging, on every device that is here."""

import pytest
import torch

from worker.kv_disk.cuda_copies import memory_of

CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.cuda,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_blocks_come_back_elsewhere_bit_by_bit(device: str, dtype: torch.dtype) -> None:
    """WK-5: out of some blocks, into others, and nothing else is touched."""
    pool = torch.randn(3, 8, 4, 2, 5).to(dtype).to(device)
    before = pool.clone()
    memory = memory_of(pool)
    assert memory.format.shape == (3, 4, 2, 5)
    assert memory.format.block_bytes == 3 * 4 * 2 * 5 * dtype.itemsize
    staging = memory.staging(4)
    memory.copy_out([5, 0], staging)
    in_file_order = torch.from_numpy(staging[:1].copy()).view(dtype).view(3, 4, 2, 5)
    assert torch.equal(in_file_order, before[:, 5].cpu())
    memory.copy_in(staging, [2, 7])
    assert torch.equal(pool[:, 2], before[:, 5])
    assert torch.equal(pool[:, 7], before[:, 0])
    untouched = [0, 1, 3, 4, 5, 6]
    assert torch.equal(pool[:, untouched], before[:, untouched])


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_blocks_are_cleared(device: str) -> None:
    """WK-12: of any number, and nothing else is touched."""
    pool = torch.full((3, 8, 4, 2, 5), torch.nan, dtype=torch.bfloat16, device=device)
    memory_of(pool).clear([5, 0])
    assert not pool[:, [5, 0]].any()
    assert pool[:, [1, 2, 3, 4, 6, 7]].isnan().all()
