"""The pool's memory."""

import pytest
import torch

from worker.attention import KVPool
from worker.attention.choice import choose_attention
from worker.runner.memory import ProcessMemory

MIB = 2**20


# Shapes that test_tiles.py compiles as well: type, heads, KV heads, size of a head.
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim"), [(torch.float32, 2, 2, 32), (torch.bfloat16, 10, 1, 32)]
)
def test_a_pool_on_the_cpu_takes_memory_only_as_it_fills(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    """Also once the attention was chosen, which tries the candidates on it."""
    meter = ProcessMemory()
    before = meter.used_bytes()
    pool = KVPool(
        layers=4,
        blocks=2**29 // (4 * 16 * 2 * kv_heads * dim * dtype.itemsize),
        block_tokens=16,
        kv_heads=kv_heads,
        head_dim=dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    assert pool.data.nbytes == 512 * MIB
    assert pool.data.data_ptr() % 64 == 0
    choose_attention("reference", pool, heads)
    choose_attention("auto", pool, heads, timer=lambda call, device: (call(), 1.0)[1])
    assert meter.used_bytes() - before < 200 * MIB
    assert not pool.data[:, ::97].any()
    pool.data[-1, -1] = 1.0
    assert pool.data[-1, -1].eq(1).all() and not pool.data[-1, -2].any()
