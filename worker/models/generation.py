"""Sampling defaults of ``generation_config.json``: what a model's author recommends. No torch.

The names are those that vLLM takes from it by default. ``do_sample`` is not among them there: a
model whose file says false is sampled all the same.
"""

from pathlib import Path

from protocol import SamplingDefaults
from protocol.generation_defaults import defaults_of
from worker.log import model_log
from worker.models.config import read_generation_config


def read_sampling_defaults(path: Path) -> SamplingDefaults:
    """Sampling defaults of checkpoint directory ``path``; unfit ones are left out with a warning.

    Raises ``BrokenCheckpoint`` for a file that cannot be read.
    """
    found = defaults_of(read_generation_config(path))
    for unfit in found.unfit:
        model_log.warning(
            "%s: %s is out of range and not used", path / "generation_config.json", unfit
        )
    return found.defaults
