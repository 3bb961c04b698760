"""Reads sampling defaults from ``generation_config.json``: the names that vLLM takes from it."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from protocol.sampling import InvalidSampling, Sampling, SamplingDefaults

_THEIRS: Final = {"max_tokens": "max_new_tokens"}
_WHOLE: Final = ("top_k", "max_tokens")


class FoundDefaults(NamedTuple):
    """Defaults found; ``unfit`` lists those out of range and left out, as ``name=value``."""

    defaults: SamplingDefaults
    unfit: tuple[str, ...]


def defaults_of(stated: Mapping[str, Any]) -> FoundDefaults:
    """Defaults stated in the contents of a ``generation_config.json``."""
    found: dict[str, Any] = {}
    unfit = []
    for name in SamplingDefaults.__struct_fields__:
        theirs = _THEIRS.get(name, name)
        value = stated.get(theirs)
        if value is None:
            continue
        if _fits(name, value):
            found[name] = value
        else:
            unfit.append(f"{theirs}={value!r}")
    return FoundDefaults(SamplingDefaults(**found), tuple(unfit))


def _fits(name: str, value: object) -> bool:
    kinds = int if name in _WHOLE else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool):
        return False
    try:
        Sampling(**({"max_tokens": 1} | {name: value})).check()  # type: ignore[arg-type]
    except InvalidSampling:
        return False
    return True
