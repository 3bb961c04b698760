"""The decoder of Llama (Touvron et al. 2023) and of what followed it.

Mistral adds a sliding window, Qwen2 biases on queries, keys and values, Qwen3 a norm per head on
queries and keys; ``families`` says who has what. Every linear layer acts on the packed tokens of a
step, whatever rows they belong to; only attention knows about rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, silu

from worker.attention import AttentionStep
from worker.models.config import ModelConfig
from worker.models.loader import Parameter, Part
from worker.models.rope import AngleTable, Rotation


class Decoder:
    """Weights are plain tensors, fused where one matrix product does for several."""

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
        rotation: AngleTable,
        attention: AttentionStep,
        index: int,
    ) -> Tensor:
        c = self._config
        heads = linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, c.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys, _ = heads.tensor_split((c.num_heads, c.num_heads + c.num_kv_heads), 1)
            queries.copy_(self._normed(queries, layer.query_norm))
            keys.copy_(self._normed(keys, layer.key_norm))
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
            if c.qkv_bias:
                found[ours + "qkv_bias"] = Parameter(
                    (
                        Part(attention + "q_proj.bias", (q,)),
                        Part(attention + "k_proj.bias", (kv,)),
                        Part(attention + "v_proj.bias", (kv,)),
                    )
                )
            if c.qk_norm:
                found[ours + "query_norm"] = one(attention + "q_norm.weight", c.head_dim)
                found[ours + "key_norm"] = one(attention + "k_norm.weight", c.head_dim)
        return found

    @staticmethod
    def unused(config: ModelConfig) -> tuple[str, ...]:
        """Tensors that a checkpoint may hold although nothing reads them."""
        return ("lm_head.weight",) if config.tie_word_embeddings else ()


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer, each [out, in]; None where the family has none."""

    attention_norm: Tensor
    qkv: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None

    @classmethod
    def from_weights(cls, weights: Mapping[str, Tensor], prefix: str) -> Self:
        """Of the weights whose names begin with ``prefix``."""
        return cls(
            attention_norm=weights[prefix + "attention_norm"],
            qkv=weights[prefix + "qkv"],
            output=weights[prefix + "output"],
            mlp_norm=weights[prefix + "mlp_norm"],
            gate_up=weights[prefix + "gate_up"],
            down=weights[prefix + "down"],
            qkv_bias=weights.get(prefix + "qkv_bias"),
            query_norm=weights.get(prefix + "query_norm"),
            key_norm=weights.get(prefix + "key_norm"),
        )


def _feed_forward(layer: Layer, x: Tensor) -> Tensor:
    gate, up = linear(x, layer.gate_up).chunk(2, dim=-1)
    return linear(silu(gate) * up, layer.down)
