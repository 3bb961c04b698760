"""Checks what the slot pipeline needs beside the text model, without importing it.

Standard library only.
"""

import importlib.util
from collections.abc import Mapping

from catalog.errors import MachineUnfit
from worker.extras import pip_install

_ENCODER = ("av", "av")
_BY_PROVIDER: Mapping[str, tuple[str, str]] = {"espeak": ("espeakng_loader", "espeakng-loader")}
"""Module and distribution of speech providers. Others are checked when the model loads."""


def lacking(speech: str = "espeak") -> tuple[str, ...]:
    """Distributions that are not installed, for clips with speech from the providers in ``speech``,
    separated by commas."""
    named = [_BY_PROVIDER.get(name.strip()) for name in speech.split(",")]
    wanted = [_ENCODER, *filter(None, named)]
    return tuple(name for module, name in wanted if importlib.util.find_spec(module) is None)


def check_slot(speech: str = "espeak") -> None:
    """Raise ``MachineUnfit`` if packages of the extra ``slot`` are missing."""
    if missing := lacking(speech):
        raise MachineUnfit(
            f"The slot pipeline needs {' and '.join(missing)}, which this Python does not have: "
            f"{pip_install('slot')} (make demo ARGS=--slot does that in a checkout), or leave out"
            " --slot."
        )
