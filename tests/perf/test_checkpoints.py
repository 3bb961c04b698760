"""Checkpoints with random weights: shapes of real models, which load."""

from pathlib import Path

import pytest
import torch

from perf.engine.checkpoints import SHAPES, make_checkpoint, write_config
from worker.models.config import read_config
from worker.models.model import load_model, parameter_count

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "millions"), [("0.5b", 494), ("1.5b", 1544), ("8b", 8030 - 525)], ids=str
)
def test_shapes_are_those_of_the_models(name: str, millions: int, tmp_path: Path) -> None:
    """Of Llama's 8030 million parameters 525 are the table, which a step does not read."""
    write_config(tmp_path, SHAPES[name])
    assert round(parameter_count(read_config(tmp_path)) / 1e6) == millions


def test_a_made_checkpoint_loads(tmp_path: Path) -> None:
    shape = SHAPES["tiny"]
    make_checkpoint(tmp_path, shape, 1)
    config = read_config(tmp_path)
    model = load_model(tmp_path, config, torch.bfloat16, torch.device("cpu"))
    # Norms, a hundredth of these, may be float32 beside weights of bfloat16.
    assert 2 * 0.9 < model.step_bytes / parameter_count(config) < 2 * 1.01
    assert sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) > shape.file_bytes
