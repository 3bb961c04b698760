"""Reads a checkpoint's ``config.json`` and ``generation_config.json``. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from worker.errors import BrokenCheckpoint, UnsupportedModel
from worker.models.families import FAMILIES, OTHERWISE, WindowRule
from worker.models.fields import Fields, read_json
from worker.models.rope_scaling import (
    DEFAULT_ROPE_THETA,
    RopeScaling,
    YarnScaling,
    rope_fields,
    rope_scaling,
)

DTypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Configuration of a dense decoder of one of ``families``. Names follow ``config.json``."""

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
    """Whether queries and keys are normalized per head before the rotation."""
    windows: tuple[int, ...]
    """Number of keys that a query sees in each layer, including its own; 0: all up to its own."""
    tie_word_embeddings: bool
    dtype: DTypeName
    """Dtype of the saved weights."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    local_rope_theta: float = DEFAULT_ROPE_THETA
    """``rope_theta`` of layers with a window, if they have their own."""


def read_config(path: Path) -> ModelConfig:
    """Read the configuration of checkpoint directory ``path``. Raises ``CheckpointError``."""
    fields = Fields(path / "config.json", read_json(path / "config.json"))
    generation = read_generation_config(path)

    architecture = _architecture(fields)
    family = FAMILIES.get(architecture)
    if family is None:
        raise UnsupportedModel(
            f"{path}: architecture {architecture!r} is not supported;"
            f" this worker runs {', '.join(sorted(FAMILIES))}; {OTHERWISE}"
        )
    for name in ("attention_bias", "mlp_bias", "use_bidirectional_attention"):
        fields.refuse(name, allowed=(False, None))
    for name in ("hidden_act", "hidden_activation"):
        fields.refuse(name, allowed=(family.activation, None))
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        fields.refuse(name, allowed=(None,))
    fields.refuse("quantization_config", allowed=(None,))
    fields.refuse("partial_rotary_factor", allowed=(1.0, None))
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    kv_heads = fields.integer("num_key_value_heads", heads)
    head_dim = fields.integer("head_dim", family.head_dim or hidden // heads)
    fields.refuse("query_pre_attn_scalar", allowed=(head_dim, None))
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
    by_kind = family.window == "by-pattern"
    local, whole = _by_kind(fields) if by_kind else (DEFAULT_ROPE_THETA, fields)
    rope = rope_fields(whole)
    scaling = rope_scaling(rope, positions)
    if isinstance(scaling, YarnScaling):  # some already include the scaling, some do not
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
        windows=_windows(fields, family.window, layers),
        tie_word_embeddings=bool(fields.values.get("tie_word_embeddings", family.tied)),
        dtype=_dtype(fields),
        bos_token_id=next(iter(_ids(path, "bos_token_id", generation, fields.values)), None),
        eos_token_ids=eos,
        local_rope_theta=local,
    )


def _by_kind(fields: Fields) -> tuple[float, Fields]:
    """The theta of layers with a window, and the fields with the other layers' rope settings."""
    kinds, local = fields.values.get("rope_parameters"), fields
    own: dict[str, Any] = {} if "rope_theta" in fields.values else {"rope_theta": 1e6}
    if isinstance(kinds, dict) and isinstance(kinds.get("full_attention"), dict):
        own = {"rope_parameters": kinds["full_attention"]}
        local = Fields(fields.file, kinds.get("sliding_attention") or {})
    name = "rope_local_base_freq" if local is fields else "rope_theta"
    theta = local.number(name, DEFAULT_ROPE_THETA)
    return theta, Fields(fields.file, fields.values | own)


def read_generation_config(path: Path) -> dict[str, Any]:
    """``generation_config.json`` of a checkpoint directory; empty if there is none.

    Raises ``BrokenCheckpoint``.
    """
    file = path / "generation_config.json"
    return read_json(file) if file.exists() else {}


def _architecture(fields: Fields) -> str:
    names = fields.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise BrokenCheckpoint(
            f"{fields.file}: architectures must name one model class, got {names!r}"
        )
    return names[0]


def _dtype(fields: Fields) -> DTypeName:
    # transformers 5 writes "dtype", earlier versions "torch_dtype".
    name = fields.values.get("dtype") or fields.values.get("torch_dtype") or "float32"
    match str(name).removeprefix("torch."):
        case "float32" | "bfloat16" | "float16" as known:
            return known
    raise UnsupportedModel(
        f"{fields.file}: weights of type {name!r} are not supported;"
        " convert the checkpoint to float32, bfloat16 or float16"
    )


def _windows(fields: Fields, rule: WindowRule, layers: int) -> tuple[int, ...]:
    """The window of each layer, with transformers' defaults for missing fields."""
    types = fields.values.get("layer_types")
    if types is not None and not rule.startswith("by-"):
        fields.refuse("layer_types", allowed=(["full_attention"] * layers, None))
    if rule == "none":
        fields.refuse("sliding_window", allowed=(None,))
        return (0,) * layers
    if rule == "every-layer":
        return (_window(fields),) * layers
    uses = rule == "by-pattern" or fields.values.get("use_sliding_window", False)
    window = _window(fields) if uses else 0
    if types is None and rule == "by-pattern":
        whole = fields.integer("sliding_window_pattern", 6)
        return tuple(window if (i + 1) % whole else 0 for i in range(layers))
    if types is None:
        first = fields.values.get("max_window_layers", 28)
        return tuple(0 if i < first else window for i in range(layers))
    if not isinstance(types, list) or len(types) != layers:
        raise BrokenCheckpoint(
            f"{fields.file}: layer_types must name the attention of each of the {layers} layers"
        )
    known = {"full_attention": 0, "sliding_attention": window}
    for kind in types:
        if kind not in known:
            raise UnsupportedModel(
                f"{fields.file}: layer type {kind!r} is not supported; {', '.join(known)} are"
            )
    if not window and "sliding_attention" in types:
        raise BrokenCheckpoint(
            f"{fields.file}: layer_types has sliding_attention, but use_sliding_window and"
            " sliding_window give it no window"
        )
    return tuple(known[kind] for kind in types)


def _window(fields: Fields) -> int:
    if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
        return 0
    return fields.integer("sliding_window", 4096)


def _ids(
    path: Path, name: str, generation: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[int, ...]:
    """Ids from ``generation_config.json``, otherwise from ``config.json``: one id, a list of ids,
    or null. Raises ``BrokenCheckpoint``."""
    value = generation.get(name)
    value = config.get(name) if value is None else value
    found = [] if value is None else value if isinstance(value, list) else [value]
    if any(not isinstance(each, int) or isinstance(each, bool) for each in found):
        raise BrokenCheckpoint(
            f"{path}: {name} must be a token id or a list of them, got {value!r}"
        )
    return tuple(dict.fromkeys(found))
