"""The measured step on the CPU: that it is one of the model's, not what it takes."""

from pathlib import Path

import pytest
import torch

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
