"""Sampling defaults of ``generation_config.json``: what a model's author found best. No torch.

The names are those that vLLM takes from it by default. ``do_sample`` is not among them there: a
model whose file says false is sampled all the same.
"""

from pathlib import Path
from typing import Any, Final

from worker.log import model_log
from worker.models.config import read_generation_config
from worker.protocol import InvalidSampling, Sampling, SamplingDefaults

_THEIRS: Final = {"max_tokens": "max_new_tokens"}
_WHOLE: Final = ("top_k", "max_tokens")


def read_sampling_defaults(path: Path) -> SamplingDefaults:
    """Those of the checkpoint directory ``path``; what does not fit is left out, with a warning.

    Raises ``BrokenCheckpoint`` for a file that cannot be read.
    """
    stated = read_generation_config(path)
    found: dict[str, Any] = {}
    for name in SamplingDefaults.__struct_fields__:
        theirs = _THEIRS.get(name, name)
        value = stated.get(theirs)
        if value is None:
            continue
        if _fits(name, value):
            found[name] = value
        else:
            model_log.warning(
                "%s: %s=%r is out of range and not used",
                path / "generation_config.json",
                theirs,
                value,
            )
    return SamplingDefaults(**found)


def _fits(name: str, value: object) -> bool:
    kinds = int if name in _WHOLE else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool):
        return False
    try:
        Sampling(**({"max_tokens": 1} | {name: value})).check()  # type: ignore[arg-type]
    except InvalidSampling:
        return False
    return True
