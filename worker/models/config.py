"""What a checkpoint's ``config.json`` and ``generation_config.json`` say. No torch."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from worker.errors import BrokenCheckpoint, UnsupportedModel
from worker.log import model_log
from worker.models.families import FAMILIES, WindowRule
from worker.models.folder import why_unservable

DTypeName = Literal["float32", "bfloat16", "float16"]

DEFAULT_ROPE_THETA: Final = 10000.0


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by ``factor`` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """NTK-aware stretch that begins beyond ``max_position_embeddings``.

    Its rotation depends on the length of the text, so keys that are in the cache already would be
    wrong beyond that point: contexts end there, and up to there it is no stretch at all.
    """

    factor: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023); names as in ``config.json``."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int
    attention_factor: float
    """Cosines and sines are multiplied by it."""
    truncate: bool


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the rotary wavelengths; names as in ``config.json``."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


RopeScaling = LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder as ``families`` lists them. Names follow ``config.json``."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_tokens: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    qkv_bias: bool
    qk_norm: bool
    """Queries and keys are normalised per head before they are rotated."""
    windows: tuple[int, ...]
    """Per layer: keys that a query sees, its own included; 0 is all before it."""
    tie_word_embeddings: bool
    dtype: DTypeName
    """Type that the weights were saved in."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def read_config(path: Path) -> ModelConfig:
    """The configuration of the checkpoint directory ``path``. Raises ``CheckpointError``."""
    fields = _Fields(path / "config.json", _read_json(path / "config.json"))
    generation = read_generation_config(path)

    architecture = fields.architecture()
    family = FAMILIES.get(architecture)
    if family is None:
        raise UnsupportedModel(
            f"{path}: architecture {architecture!r} is not supported;"
            f" this worker runs {', '.join(sorted(FAMILIES))}"
        )
    for name in ("attention_bias", "mlp_bias"):
        fields.refuse(name, allowed=(False, None))
    fields.refuse("hidden_act", allowed=("silu", None))
    fields.refuse("quantization_config", allowed=(None,))
    fields.refuse("partial_rotary_factor", allowed=(1.0, None))
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    kv_heads = fields.integer("num_key_value_heads", heads)
    head_dim = fields.integer("head_dim", family.head_dim or hidden // heads)
    if head_dim % 2:
        raise UnsupportedModel(f"{fields.file}: head_dim={head_dim} is odd; halves are rotated")
    if heads % kv_heads:
        raise BrokenCheckpoint(
            f"{fields.file}: num_attention_heads ({heads}) must be a multiple of"
            f" num_key_value_heads ({kv_heads})"
        )
    vocab_size = fields.integer("vocab_size")
    eos = _ids(path, "eos_token_id", generation, fields.values)
    if any(not 0 <= token < vocab_size for token in eos):
        raise BrokenCheckpoint(
            f"{path}: eos_token_id {list(eos)} is outside the vocabulary of {vocab_size} tokens"
        )
    layers = fields.integer("num_hidden_layers")
    positions = fields.integer("max_position_embeddings")
    rope = fields.rope()
    scaling = rope.scaling(positions)
    if isinstance(scaling, YarnScaling):  # some count the stretch in already, some do not
        stretched = scaling.original_max_position_embeddings * scaling.factor
        positions = max(positions, int(stretched))
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_tokens=positions,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", DEFAULT_ROPE_THETA),
        rope_scaling=scaling,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        windows=fields.windows(family.window, layers),
        tie_word_embeddings=bool(fields.values.get("tie_word_embeddings", False)),
        dtype=fields.dtype(),
        bos_token_id=next(iter(_ids(path, "bos_token_id", generation, fields.values)), None),
        eos_token_ids=eos,
    )


def read_generation_config(path: Path) -> dict[str, Any]:
    """``generation_config.json`` of a checkpoint directory; empty where there is none.

    Raises ``BrokenCheckpoint``.
    """
    file = path / "generation_config.json"
    return _read_json(file) if file.exists() else {}


class _Fields:
    """Typed reads of one JSON object, whose errors name file and field."""

    def __init__(self, file: Path, values: dict[str, Any]) -> None:
        self.file = file
        self.values = values

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BrokenCheckpoint(f"{self.file}: {name} must be a positive integer, got {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise BrokenCheckpoint(f"{self.file}: {name} must be a positive number, got {value!r}")
        return float(value)

    def refuse(self, name: str, allowed: tuple[object, ...]) -> None:
        value = self.values.get(name)
        if value not in allowed:
            raise UnsupportedModel(
                f"{self.file}: {name}={value!r} is not supported;"
                f" this worker runs models with {name}={allowed[0]!r}"
            )

    def architecture(self) -> str:
        names = self.values.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise BrokenCheckpoint(
                f"{self.file}: architectures must name one model class, got {names!r}"
            )
        return names[0]

    def dtype(self) -> DTypeName:
        # transformers 5 writes "dtype", earlier versions "torch_dtype".
        name = self.values.get("dtype") or self.values.get("torch_dtype") or "float32"
        match str(name).removeprefix("torch."):
            case "float32" | "bfloat16" | "float16" as known:
                return known
        raise UnsupportedModel(
            f"{self.file}: weights of type {name!r} are not supported;"
            " convert the checkpoint to float32, bfloat16 or float16"
        )

    def rope(self) -> "_Fields":
        """The rotary settings in one object, wherever this version of transformers put them.

        transformers 5: all of them in ``rope_parameters``. Before: ``rope_theta`` at the top and
        the rest in ``rope_scaling``. Where both are there, because someone has added the latter,
        transformers reads that one only (``convert_rope_params_to_dict``, 5.23): not even
        ``rope_theta`` comes from ``rope_parameters`` then.
        """
        parameters, scaling = self.values.get("rope_parameters"), self.values.get("rope_scaling")
        nested = scaling or parameters or {}
        if not isinstance(nested, dict):
            raise BrokenCheckpoint(f"{self.file}: the rope settings must be an object")
        if any(isinstance(value, dict) for value in nested.values()):
            raise UnsupportedModel(
                f"{self.file}: rope settings of their own for each kind of layer are not supported"
            )
        theta = self.values.get("rope_theta")
        if scaling and isinstance(parameters, dict) and scaling != parameters:
            model_log.warning(
                "%s has rope_parameters and rope_scaling: the latter counts alone, as in"
                " transformers, with rope_theta %s",
                self.file,
                nested.get("rope_theta", theta or f"{DEFAULT_ROPE_THETA:g}, the default"),
            )
            if theta is None and "rope_theta" in parameters and "rope_theta" not in nested:
                model_log.warning(
                    "%s: the rope_theta of %s in rope_parameters is not used, which the model was"
                    " probably trained with; write it into rope_scaling too",
                    self.file,
                    parameters["rope_theta"],
                )
        rope = _Fields(self.file, {"rope_theta": theta, **nested})
        rope.refuse("partial_rotary_factor", allowed=(1.0, None))
        return rope

    def scaling(self, max_positions: int) -> RopeScaling | None:
        """Of rotary settings; ``max_positions`` is the model's ``max_position_embeddings``."""
        match self.values.get("rope_type") or self.values.get("type") or "default":
            case "default":
                return None
            case "linear":
                return LinearScaling(self.number("factor"))
            case "dynamic":
                return DynamicScaling(self.number("factor"))
            case "yarn":
                return self._yarn(max_positions)
            case "llama3":
                return Llama3Scaling(
                    factor=self.number("factor"),
                    low_freq_factor=self.number("low_freq_factor"),
                    high_freq_factor=self.number("high_freq_factor"),
                    original_max_position_embeddings=self.integer(
                        "original_max_position_embeddings"
                    ),
                )
            case kind:
                raise UnsupportedModel(
                    f"{self.file}: rope type {kind!r} is not supported;"
                    " 'default', 'linear', 'dynamic', 'yarn' and 'llama3' are"
                )

    def _yarn(self, max_positions: int) -> YarnScaling:
        original = self.integer("original_max_position_embeddings", max_positions)
        factor = self.number("factor", max_positions / original)
        if self.values.get("attention_factor") is not None:
            attention_factor = self.number("attention_factor")
        elif self.values.get("mscale") and self.values.get("mscale_all_dim"):
            attention_factor = _yarn_mscale(factor, self.number("mscale")) / _yarn_mscale(
                factor, self.number("mscale_all_dim")
            )
        else:
            attention_factor = _yarn_mscale(factor, 1.0)
        return YarnScaling(
            factor=factor,
            beta_fast=self.number("beta_fast", 32.0),
            beta_slow=self.number("beta_slow", 1.0),
            original_max_position_embeddings=original,
            attention_factor=attention_factor,
            truncate=bool(self.values.get("truncate", True)),
        )

    def windows(self, rule: WindowRule, layers: int) -> tuple[int, ...]:
        """The window of each layer, with the defaults of transformers for what is not said."""
        types = self.values.get("layer_types")
        if types is not None and rule != "by-layer":
            self.refuse("layer_types", allowed=(["full_attention"] * layers, None))
        if rule == "none":
            self.refuse("sliding_window", allowed=(None,))
            return (0,) * layers
        if rule == "every-layer":
            return (self._window(),) * layers
        window = self._window() if self.values.get("use_sliding_window", False) else 0
        if types is None:
            first = self.values.get("max_window_layers", 28)
            return tuple(0 if i < first else window for i in range(layers))
        if not isinstance(types, list) or len(types) != layers:
            raise BrokenCheckpoint(
                f"{self.file}: layer_types must name the attention of each of the {layers} layers"
            )
        known = {"full_attention": 0, "sliding_attention": window}
        for kind in types:
            if kind not in known:
                raise UnsupportedModel(
                    f"{self.file}: layer type {kind!r} is not supported; {', '.join(known)} are"
                )
        if not window and "sliding_attention" in types:
            raise BrokenCheckpoint(
                f"{self.file}: layer_types has sliding_attention, but use_sliding_window and"
                " sliding_window give it no window"
            )
        return tuple(known[kind] for kind in types)

    def _window(self) -> int:
        if "sliding_window" in self.values and self.values["sliding_window"] is None:
            return 0
        return self.integer("sliding_window", 4096)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text("utf-8"))
    except FileNotFoundError as error:
        raise BrokenCheckpoint(why_unservable(file.parent) or f"{file} is missing") from error
    except NotADirectoryError as error:
        raise BrokenCheckpoint(why_unservable(file.parent) or str(error)) from error
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenCheckpoint(f"{file} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise BrokenCheckpoint(f"{file} must hold a JSON object, got {type(values).__name__}")
    return values


def _ids(
    path: Path, name: str, generation: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[int, ...]:
    """Of ``generation_config.json``, else of ``config.json``: one id, a list of them, or null."""
    value = generation.get(name)
    value = config.get(name) if value is None else value
    found = [] if value is None else value if isinstance(value, list) else [value]
    if any(not isinstance(each, int) or isinstance(each, bool) for each in found):
        raise BrokenCheckpoint(
            f"{path}: {name} must be a token id or a list of them, got {value!r}"
        )
    return tuple(dict.fromkeys(found))
