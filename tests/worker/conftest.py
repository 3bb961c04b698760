from pathlib import Path

import pytest
import torch

# More threads than that only wait for each other on small models and shared machines.
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a few random weights."""
    from tests.support.checkpoints import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("tiny"))
