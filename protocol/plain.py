"""Parameters of the plain contract: those of Triton's vLLM backend, name for name."""

from collections.abc import Collection, Mapping
from typing import Any

from protocol import tensors as names
from protocol.excerpt import excerpt

DEFAULT_MAX_TOKENS = 16
"""Default of ``max_tokens``, vLLM's own."""

NEUTRAL: Mapping[str, object] = {
    "n": 1,
    "best_of": 1,
    "length_penalty": 1,
    "use_beam_search": False,
    "early_stopping": False,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "detokenize": True,
    "bad_words": [],
}
"""vLLM parameters that are accepted only at the value that changes nothing, where they are not
served."""

TRITONS_OWN = ("priority", "timeout", names.PARAM_TOKEN)
"""Request parameters for Triton itself, or checked earlier; ignored here."""


class UnsupportedParameter(ValueError):
    """A vLLM parameter has an unsupported value; the message says which one is supported."""


def stated_parameters(source: Mapping[str, Any], served: Collection[str] = ()) -> dict[str, Any]:
    """Parameters in ``source`` that ask for something; those of ``NEUTRAL`` only where they are in
    ``served``. Raises ``UnsupportedParameter`` for another one of these."""
    stated: dict[str, Any] = {}
    for name, value in source.items():
        if name in NEUTRAL and name not in served:
            if value is not None and str(value).lower() not in _spellings(NEUTRAL[name]):
                raise UnsupportedParameter(
                    f"{name}={excerpt(repr(value))} is not supported; "
                    f"leave it out or at {NEUTRAL[name]!r}"
                )
        elif value is not None and name not in TRITONS_OWN and not name.startswith("triton_"):
            stated[name] = value
    return stated


def _spellings(neutral: object) -> set[str]:
    spelled = {str(neutral).lower()}
    if not isinstance(neutral, bool) and isinstance(neutral, int):
        spelled.add(str(float(neutral)))
    return spelled
