"""Steps done by the team of threads, next to the model's own way, operation by operation."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.support.checkpoints import make_checkpoint
from tests.support.model import BLOCK_TOKENS, Rig
from tests.worker.models.test_blocked import dtype_of, form, needs_kernel
from worker.attention import PackedBatch
from worker.attention.numba_backend import NumbaAttention
from worker.cpu_kernels.block_job import Form
from worker.cpu_kernels.block_products import PASS_ROWS
from worker.cpu_kernels.team import TAKEN
from worker.models import loader
from worker.models.loader import Layout
from worker.models.team_steps import LayerSteps, TeamSteps, WholeStep

__all__ = ["form"]

CONTEXTS = (1, 300, 17, 700, 40)
"""Tokens of the rows: two of them are cut into spans."""
ALONE = (1,) * len(CONTEXTS)
KINDS: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "mistral": {"model_type": "mistral", "sliding_window": 290},
    "qwen2-upper-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 290,
        "max_window_layers": 1,
    },
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Rivals:
    """A model's own way to compute a step, and the team's."""

    def __init__(self, path: Path, form: Form, kind: str) -> None:
        changes = {"max_position_embeddings": 1024, "num_hidden_layers": 5} | KINDS[kind]
        make_checkpoint(path, **changes)  # type: ignore[arg-type]
        rig = Rig(path, dtype=dtype_of(form), layout=Layout(), blocks=400)
        self.model, self._pool = rig.model, rig.pool.data
        config = self.model.config
        self.attention = NumbaAttention(rig.pool, config.num_heads, windows=config.windows)
        self._seeded = torch.Generator().manual_seed(4)
        filled = torch.randn(self._pool.shape, generator=self._seeded)
        self._filled = filled.to(self._pool.dtype)

    def compare(self, steps: TeamSteps, contexts: Sequence[int], counts: Sequence[int]) -> None:
        """Rows of ``contexts`` tokens, of which the last ``counts`` are computed."""
        batch, pool = batch_of(contexts, counts), self._pool
        vocabulary, tokens = self.model.config.vocab_size, sum(counts)
        ids = torch.randint(0, vocabulary, (tokens,), generator=self._seeded)
        positions = torch.from_numpy(positions_of(contexts, counts))
        pool.copy_(self._filled)
        with torch.inference_mode():
            expected = self.model.forward(ids, positions, self.attention.prepare(batch))
            stored = pool.clone()
            pool.copy_(self._filled)
            assert steps.takes(batch)
            found = steps.hidden(batch, ids, positions)
        assert distance(found, expected) < TOLERANCE[pool.dtype]
        assert distance(pool, stored) < TOLERANCE[pool.dtype]
        assert not torch.equal(pool, self._filled)


def positions_of(contexts: Sequence[int], counts: Sequence[int]) -> NDArray[np.int64]:
    rows = zip(contexts, counts, strict=True)
    return np.concatenate([np.arange(context - count, context) for context, count in rows])


def batch_of(contexts: Sequence[int], counts: Sequence[int]) -> PackedBatch:
    blocks = [-(-context // BLOCK_TOKENS) for context in contexts]
    free = iter(np.random.default_rng(2).permutation(400))
    table = np.zeros((len(contexts), max(blocks)), np.int64)
    for row, count in enumerate(blocks):
        table[row, :count] = [next(free) for _ in range(count)]
    row_of, positions = np.repeat(np.arange(len(counts)), counts), positions_of(contexts, counts)
    slots = table[row_of, positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
    decodes = sum(count == 1 for count in counts)
    return PackedBatch(decodes, np.array(counts), np.array(contexts), table, slots)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_what_the_model_does(
    kind: str, form: Form, threads: int, tmp_path: Path
) -> None:
    """Also where threads lose their cores to each other, and where a part of each job was begun by
    one that never ends it."""
    rivals = Rivals(tmp_path, form, kind)
    whole = WholeStep.of(rivals.model, rivals.attention, 16)
    layers = LayerSteps.of(rivals.model, rivals.attention, 96)
    assert whole is not None and layers is not None
    most = layers.most_rows
    assert most == (PASS_ROWS if form == Form.TILES else 96)
    rivals.compare(whole, CONTEXTS[:1], ALONE[:1])
    for _ in range(5):
        rivals.compare(whole, CONTEXTS, ALONE)
        rivals.compare(layers, CONTEXTS, (1, 1, 5, most - 10, 3))
    rivals.compare(layers, (700, 300), (most - 25, 25))
    for steps in (whole, layers):
        steps._template[:, TAKEN] = 1
    rivals.compare(whole, CONTEXTS[:3], ALONE[:3])
    rivals.compare(layers, CONTEXTS[:3], (1, 1, 9))


@needs_kernel
def test_what_it_cannot_compute_is_left_to_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path)
    rig = Rig(tmp_path)
    assert WholeStep.of(rig.model, rig.attention, 8) is None
    assert WholeStep.of(rig.model, NumbaAttention(rig.pool, 6), 0) is None
    monkeypatch.setattr(loader, "blocks_fit", lambda dtype: False)
    dense = Rig(tmp_path)
    assert WholeStep.of(dense.model, NumbaAttention(dense.pool, 6), 8) is None
