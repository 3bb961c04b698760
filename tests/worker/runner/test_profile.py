"""The measured step on the CPU: that it is one of the model's, not what it takes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.cases import for_each
from tests.support.checkpoints import make_checkpoint
from worker.models.config import read_config
from worker.models.model import load_model
from worker.runner import build

CPU = torch.device("cpu")


def test_a_step_longer_than_the_context_is_several_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a position beyond the model's context ends the whole process."""
    path = make_checkpoint(tmp_path)
    config = read_config(path)
    model = load_model(path, config, torch.float32, CPU)
    allocated = iter([1000, 5000])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: next(allocated))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: next(allocated))
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda _: None)
    tokens = 2 * config.context_tokens + 3
    found = build.largest_step_bytes(model, config, CPU, tokens=tokens, rows=5)
    assert found == 4000 + 3 * 5 * config.vocab_size * 4


@for_each(("tokens", "longest"), [(1, 100), (100, 100), (130, 50), (64, 16)])
def test_prompts_have_places_of_their_own(tokens: int, longest: int) -> None:
    batch = build._prompts(tokens, longest)
    assert batch.query_tokens.sum() == tokens and batch.query_tokens.max() <= longest
    assert len(set(batch.slots.tolist())) == tokens
    begin = 0
    for row, count in enumerate(batch.query_tokens):
        blocks = batch.block_table[row, np.arange(count) // 16]
        expected = blocks * 16 + np.arange(count) % 16
        assert batch.slots[begin : begin + count].tolist() == expected.tolist()
        begin += count
