"""The scalings of rotary positions that a config may request. No torch."""

import math
from dataclasses import dataclass
from typing import Final

from worker.errors import BrokenCheckpoint, UnsupportedModel
from worker.log import model_log
from worker.models.fields import Fields

DEFAULT_ROPE_THETA: Final = 10000.0
YARN_BETA_FAST: Final = 32.0
YARN_BETA_SLOW: Final = 1.0


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by ``factor`` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023); names as in ``config.json``."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int
    attention_factor: float
    """Factor for cosines and sines."""
    truncate: bool


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling of the rotary wavelengths; names as in ``config.json``."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


RopeScaling = LinearScaling | YarnScaling | Llama3Scaling


def rope_fields(fields: Fields) -> Fields:
    """The rotary settings as one object, from the fields of any version of transformers.

    transformers 5 has all of them in ``rope_parameters``; earlier versions have ``rope_theta`` at
    the top level and the rest in ``rope_scaling``. If both exist, transformers reads only
    ``rope_scaling`` (``convert_rope_params_to_dict``, 5.23) and does not take even ``rope_theta``
    from ``rope_parameters``.
    """
    parameters, scaling = fields.values.get("rope_parameters"), fields.values.get("rope_scaling")
    nested = scaling or parameters or {}
    if not isinstance(nested, dict):
        raise BrokenCheckpoint(f"{fields.file}: the rope settings must be an object")
    if any(isinstance(value, dict) for value in nested.values()):
        raise UnsupportedModel(
            f"{fields.file}: separate rope settings for each kind of layer are not supported"
        )
    theta = fields.values.get("rope_theta")
    if scaling and isinstance(parameters, dict) and scaling != parameters:
        model_log.warning(
            "%s has rope_parameters and rope_scaling: the latter counts alone, as in"
            " transformers, with rope_theta %s",
            fields.file,
            nested.get("rope_theta", theta or f"{DEFAULT_ROPE_THETA:g}, the default"),
        )
        if theta is None and "rope_theta" in parameters and "rope_theta" not in nested:
            model_log.warning(
                "%s: the rope_theta of %s in rope_parameters is not used, but the model was"
                " probably trained with it; write it into rope_scaling too",
                fields.file,
                parameters["rope_theta"],
            )
    rope = Fields(fields.file, {"rope_theta": theta, **nested})
    rope.refuse("partial_rotary_factor", allowed=(1.0, None))
    return rope


def rope_scaling(rope: Fields, max_positions: int) -> RopeScaling | None:
    """The scaling that ``rope`` requests; ``max_positions`` is ``max_position_embeddings``."""
    match rope.values.get("rope_type") or rope.values.get("type") or "default":
        case "default":
            return None
        case "dynamic":
            # NTK-aware scaling beyond ``max_position_embeddings`` depends on the text's length, so
            # cached keys would be wrong beyond that. Contexts end there instead.
            rope.number("factor")
            return None
        case "linear":
            return LinearScaling(rope.number("factor"))
        case "yarn":
            return _yarn(rope, max_positions)
        case "llama3":
            return Llama3Scaling(
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
            )
        case kind:
            raise UnsupportedModel(
                f"{rope.file}: rope type {kind!r} is not supported;"
                " 'default', 'linear', 'dynamic', 'yarn' and 'llama3' are"
            )


def _yarn(rope: Fields, max_positions: int) -> YarnScaling:
    original = rope.integer("original_max_position_embeddings", max_positions)
    factor = rope.number("factor", max_positions / original)
    if rope.values.get("attention_factor") is not None:
        attention_factor = rope.number("attention_factor")
    elif rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        attention_factor = yarn_mscale(factor, rope.number("mscale")) / yarn_mscale(
            factor, rope.number("mscale_all_dim")
        )
    else:
        attention_factor = yarn_mscale(factor)
    return YarnScaling(
        factor=factor,
        beta_fast=rope.number("beta_fast", YARN_BETA_FAST),
        beta_slow=rope.number("beta_slow", YARN_BETA_SLOW),
        original_max_position_embeddings=original,
        attention_factor=attention_factor,
        truncate=bool(rope.values.get("truncate", True)),
    )


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """The factor for cosines and sines when scaling by ``factor``, as in the YaRN paper."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
