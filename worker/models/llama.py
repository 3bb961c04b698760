"""Llama (Touvron et al. 2023; grouped queries and rotary scaling as of Llama 3.1).

Every linear layer acts on the packed tokens of a step, whatever rows they belong to; only
attention knows about rows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, silu

from worker.attention import AttentionStep
from worker.models.config import Llama3Scaling, ModelConfig
from worker.models.loader import Parameter, Part


class Llama:
    """The decoder. Weights are plain tensors, fused where one matrix product does for several."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        self._config = config
        self._embedding = weights["embedding"]
        self._head = weights.get("head", self._embedding)
        self._norm = weights["norm"]
        self._layers = [
            Layer.from_weights(weights, f"layers.{i}.") for i in range(config.num_layers)
        ]
        self._rotation = Rotation(config, self._embedding.device, self._embedding.dtype)
        self.parameter_bytes = sum(t.numel() * t.element_size() for t in weights.values())

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionStep) -> Tensor:
        """``token_ids`` and ``positions`` [tokens] int64 → hidden states [tokens, hidden]."""
        x = embedding(token_ids, self._embedding)
        rotation = self._rotation.at(positions)
        for i, layer in enumerate(self._layers):
            x = x + self._attend(
                layer, self._normed(x, layer.attention_norm), rotation, attention, i
            )
            x = x + _feed_forward(layer, self._normed(x, layer.mlp_norm))
        return self._normed(x, self._norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [rows, hidden] → float32 logits [rows, vocabulary]."""
        return linear(hidden, self._head).float()

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)

    def _attend(
        self,
        layer: "Layer",
        x: Tensor,
        rotation: "AngleTable",
        attention: AttentionStep,
        index: int,
    ) -> Tensor:
        c = self._config
        heads = linear(x, layer.qkv).view(len(x), -1, c.head_dim)
        rotation.apply_(heads[:, : c.num_heads + c.num_kv_heads])
        queries, keys_values = heads.tensor_split((c.num_heads,), dim=1)
        mixed = attention.attend(index, queries, keys_values)
        return linear(mixed.flatten(1), layer.output)

    @staticmethod
    def parameters(config: ModelConfig) -> dict[str, Parameter]:
        """What to load, and from which tensors of a checkpoint."""
        c = config
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        hidden, inner = c.hidden_size, c.intermediate_size

        def one(name: str, *shape: int) -> Parameter:
            return Parameter((Part(name, shape),))

        found = {
            "embedding": one("model.embed_tokens.weight", c.vocab_size, hidden),
            "norm": one("model.norm.weight", hidden),
        }
        if not c.tie_word_embeddings:
            found["head"] = one("lm_head.weight", c.vocab_size, hidden)
        for i in range(c.num_layers):
            ours, theirs = f"layers.{i}.", f"model.layers.{i}."
            attention, mlp = theirs + "self_attn.", theirs + "mlp."
            found |= {
                ours + "attention_norm": one(theirs + "input_layernorm.weight", hidden),
                ours + "qkv": Parameter(
                    (
                        Part(attention + "q_proj.weight", (q, hidden)),
                        Part(attention + "k_proj.weight", (kv, hidden)),
                        Part(attention + "v_proj.weight", (kv, hidden)),
                    )
                ),
                ours + "output": one(attention + "o_proj.weight", hidden, q),
                ours + "mlp_norm": one(theirs + "post_attention_layernorm.weight", hidden),
                ours + "gate_up": Parameter(
                    (
                        Part(mlp + "gate_proj.weight", (inner, hidden)),
                        Part(mlp + "up_proj.weight", (inner, hidden)),
                    )
                ),
                ours + "down": one(mlp + "down_proj.weight", hidden, inner),
            }
        return found

    @staticmethod
    def unused(config: ModelConfig) -> tuple[str, ...]:
        """Tensors that a checkpoint may hold although nothing reads them."""
        return ("lm_head.weight",) if config.tie_word_embeddings else ()


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer, each [out, in]."""

    attention_norm: Tensor
    qkv: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def from_weights(cls, weights: Mapping[str, Tensor], prefix: str) -> Self:
        return cls(**{name: weights[prefix + name] for name in cls.__slots__})


def _feed_forward(layer: Layer, x: Tensor) -> Tensor:
    gate, up = linear(x, layer.gate_up).chunk(2, dim=-1)
    return linear(silu(gate) * up, layer.down)


class Rotation:
    """Rotary position embedding (Su et al. 2021), halves rotated as in Hugging Face's layout."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        frequencies = config.rope_theta**-exponents
        if config.rope_scaling is not None:
            frequencies = _stretched(frequencies, config.rope_scaling)
        angles = torch.outer(torch.arange(config.context_tokens).float(), frequencies)
        cos, sin = angles.cos(), angles.sin()
        # Signs and halves are folded into the tables: one product and one sum are left.
        self._cos = torch.cat((cos, cos), dim=-1).to(device, dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).to(device, dtype)
        self._half = config.head_dim // 2

    def at(self, positions: Tensor) -> "AngleTable":
        """Tables for ``positions`` [tokens], gathered once for all layers of a step."""
        return AngleTable(
            self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1), self._half
        )


@dataclass(frozen=True, slots=True)
class AngleTable:
    """Cosines and signed sines [tokens, 1, head_dim] of one step's positions."""

    cos: Tensor
    sin: Tensor
    half: int

    def apply_(self, x: Tensor) -> None:
        """Rotate heads [tokens, heads, head_dim] in place."""
        swapped = x.roll(self.half, dims=-1)
        x.mul_(self.cos).addcmul_(swapped, self.sin)


def _stretched(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Long wavelengths divided by ``factor``, short ones kept, a smooth ramp between."""
    context = scaling.original_max_position_embeddings
    turns = context * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)
