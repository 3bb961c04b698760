from collections.abc import Iterator
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


@pytest.fixture(params=[1, 8], ids=["alone", "more threads than cores"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
