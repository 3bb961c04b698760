"""A step done in one go by the team, next to the model's own way, operation by operation."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.checkpoints import make_checkpoint
from tests.support.model import BLOCK_TOKENS, Rig
from tests.worker.models.test_blocked import dtype_of, form, needs_kernel
from worker.attention import PackedBatch
from worker.attention.numba_backend import NumbaAttention
from worker.cpu_kernels.block_job import Form
from worker.cpu_kernels.team import TAKEN
from worker.models import loader
from worker.models.loader import Layout
from worker.models.whole_step import WholeStep

__all__ = ["form"]

CONTEXTS = (1, 300, 17, 700, 40)
"""Tokens of the rows: two of them are cut into spans."""
KINDS: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {"model_type": "qwen2"},
    "mistral": {"model_type": "mistral", "sliding_window": 290},
    "qwen2-upper-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 290,
        "max_window_layers": 1,
    },
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(params=[1, 8], ids=["alone", "more threads than cores"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def rig_of(path: Path, form: Form, **changes: object) -> Rig:
    make_checkpoint(path, max_position_embeddings=1024, **changes)  # type: ignore[arg-type]
    return Rig(path, dtype=dtype_of(form), layout=Layout(), blocks=400)


def batch_of(rows: int) -> PackedBatch:
    contexts = np.array(CONTEXTS[:rows])
    blocks = -(-contexts // BLOCK_TOKENS)
    free = iter(np.random.default_rng(2).permutation(400))
    table = np.zeros((rows, blocks.max()), np.int64)
    for row, count in enumerate(blocks):
        table[row, :count] = [next(free) for _ in range(count)]
    last = contexts - 1
    slots = table[np.arange(rows), last // BLOCK_TOKENS] * BLOCK_TOKENS + last % BLOCK_TOKENS
    return PackedBatch(rows, np.ones(rows, np.int64), contexts, table, slots)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_what_the_model_does(
    kind: str, form: Form, threads: int, tmp_path: Path
) -> None:
    """Also where a part of each job was begun by a thread that never ends it, and where threads
    lose their cores to each other."""
    rig = rig_of(tmp_path, form, **KINDS[kind])
    config, pool = rig.model.config, rig.pool.data
    attention = NumbaAttention(rig.pool, config.num_heads, windows=config.windows)
    whole = WholeStep.of(rig.model, attention, len(CONTEXTS))
    assert whole is not None and whole.most_rows == len(CONTEXTS)
    seeded = torch.Generator().manual_seed(4)
    filled = torch.randn(pool.shape, generator=seeded).to(pool.dtype)
    for rows, taken in ((1, 0), *[(len(CONTEXTS), 0)] * 5, (3, 1)):
        batch = batch_of(rows)
        ids = torch.randint(0, config.vocab_size, (rows,), generator=seeded)
        positions = torch.from_numpy(batch.context_tokens - 1)
        pool.copy_(filled)
        with torch.inference_mode():
            expected = rig.model.forward(ids, positions, attention.prepare(batch))
            stored = pool.clone()
            pool.copy_(filled)
            whole._template[:, TAKEN] = taken
            found = whole.hidden(batch, ids, positions)
        assert distance(found, expected) < TOLERANCE[pool.dtype]
        assert distance(pool, stored) < TOLERANCE[pool.dtype]
        assert not torch.equal(pool, filled)


@needs_kernel
def test_what_it_cannot_compute_is_left_to_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path)
    rig = Rig(tmp_path)
    assert WholeStep.of(rig.model, rig.attention, 8) is None
    monkeypatch.setattr(loader, "blocks_fit", lambda dtype: False)
    dense = Rig(tmp_path)
    assert WholeStep.of(dense.model, NumbaAttention(dense.pool, 6), 8) is None
