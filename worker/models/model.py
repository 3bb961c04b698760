"""The decoder of Llama (Touvron et al. 2023) and its successors, and loading it as a model.

Mistral adds a sliding window, Qwen2 adds biases on queries, keys and values, and Qwen3 adds a norm
per head on queries and keys; ``families`` lists the traits. Every linear layer processes the packed
tokens of a step; only attention knows about rows.
"""

import math
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad, rms_norm

from worker.attention import AttentionStep
from worker.log import model_log
from worker.models.checkpoint import differ
from worker.models.config import ModelConfig
from worker.models.families import FAMILIES
from worker.models.fused import add_normed_, rotate_
from worker.models.linear import Linear
from worker.models.loader import Layout, Weights, load_weights
from worker.models.parameters import Kind, Parameter, StoredPart
from worker.models.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling


class Rotation:
    """Cosines and sines for every position of the context."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        frequencies, scale = rotary_frequencies(config)
        angles = torch.outer(torch.arange(config.context_tokens).float(), frequencies)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        # Signs and halves are folded into the tables, which leaves one product and one sum.
        self._cos = torch.cat((cos, cos), dim=-1).to(device, dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).to(device, dtype)

    def at(self, positions: Tensor) -> "AngleTable":
        """Gather the tables for ``positions`` [tokens], once for all layers of a step."""
        return AngleTable(self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1))


class AngleTable(NamedTuple):
    """Cosines and signed sines [tokens, 1, head_dim] of one step's positions."""

    cos: Tensor
    sin: Tensor


def rotary_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Radians per position [head_dim / 2] float32, and the factor for cosines and sines."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = config.rope_theta**-exponents
    match config.rope_scaling:
        case LinearScaling(factor):
            return frequencies / factor, 1.0
        case YarnScaling() as yarn:
            return _yarn(frequencies, yarn, config), yarn.attention_factor
        case Llama3Scaling() as llama3:
            return _llama3(frequencies, llama3), 1.0
    return frequencies, 1.0


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Frequencies of long wavelengths divided by ``factor``, others kept, a smooth ramp between."""
    context = scaling.original_max_position_embeddings
    turns = context * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _yarn(frequencies: Tensor, scaling: YarnScaling, config: ModelConfig) -> Tensor:
    """Like ``_llama3``, but the ramp is linear in the dimension's index."""

    def dimension(turns: float) -> float:
        """Index of the dimension that rotates ``turns`` times within the original context."""
        context = scaling.original_max_position_embeddings
        span = math.log(context / (turns * 2 * math.pi))
        return config.head_dim * span / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    ramp = (torch.arange(len(frequencies)).float() - low) / max(high - low, 1e-3)
    kept = 1 - ramp.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"


class Decoder:
    """The decoder over a packed batch: the tokens of all rows of a step, row after row. ``linear``
    determines the memory layout of its weights."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self._embedding = weights.tensors["embedding"]
        self._dtype = weights.rows_dtype
        self.dtype = weights.dtype
        """Dtype of its weights and of the KV pool."""
        self.norm = weights.tensors["norm"]
        self._head = weights.linears["head"]
        self.layers = [
            Layer.from_weights(weights, f"layers.{i}.") for i in range(config.num_layers)
        ]
        self.rotation = Rotation(config, self._embedding.device, self._dtype)
        self._least_rows = weights.form.least_rows
        self.tile_rows = weights.form.tile_rows
        self.step_bytes = weights.step_bytes
        """Minimum bytes of weights that a step reads."""
        self.products = type(self._head).__name__
        """Class name of its linear layers: each class rounds differently."""

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionStep) -> Tensor:
        """Map ``token_ids`` and ``positions`` [tokens] int64 to hidden states [tokens, hidden]."""
        tokens = len(token_ids)
        filler = max(0, self._least_rows - tokens)  # extra rows whose results are unused
        if filler:
            token_ids, positions = pad(token_ids, (0, filler)), pad(positions, (0, filler))
        embedded = self.embedded(token_ids)
        rotations = self._rotations(positions)
        # Each sum is computed together with the norm after it: on CUDA that is one kernel.
        after = [layer.attention_norm for layer in self.layers[1:]] + [self.norm]
        x = torch.zeros_like(embedded)
        normed = self._add_normed_(x, embedded, self.layers[0].attention_norm)
        for i, layer in enumerate(self.layers):
            queries, keys_values = self._project(layer, normed, rotations[i])
            mixed = attention.attend(i, queries[:tokens], keys_values[:tokens])
            mixed = mixed.flatten(1).to(self._dtype)
            if filler:
                mixed = pad(mixed, (0, 0, 0, filler))
            normed = self._add_normed_(x, self._mixed(i, mixed), layer.mlp_norm)
            normed = self._add_normed_(x, self._mlp(i, normed), after[i])
        return normed[:tokens]

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states [rows, hidden] to float32 logits [rows, vocabulary]."""
        rows = len(hidden)
        if rows < self._least_rows:
            hidden = pad(hidden, (0, 0, 0, self._least_rows - rows))
        return self._head(hidden)[:rows].float()

    def embedded(self, token_ids: Tensor) -> Tensor:
        """The first layer's input for ``token_ids`` [tokens]: [tokens, hidden]."""
        return embedding(token_ids, self._embedding).to(self._dtype)

    def _rotations(self, positions: Tensor) -> list[AngleTable]:
        """The rotation angles of each layer."""
        return [self.rotation.at(positions)] * len(self.layers)

    def _mixed(self, i: int, mixed: Tensor) -> Tensor:
        """The output that attention adds, from its heads' results: [tokens, hidden]."""
        return self.layers[i].output(mixed)

    def _mlp(self, i: int, x: Tensor) -> Tensor:
        return self.layers[i].down(self.layers[i].gate_up(x))

    def _project(self, layer: "Layer", x: Tensor, rotation: AngleTable) -> tuple[Tensor, Tensor]:
        """Rotated queries [tokens, heads, head_dim]; rotated keys, then values, likewise."""
        c = self.config
        heads = layer.qkv(x).view(len(x), -1, c.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys, _ = heads.tensor_split((c.num_heads, c.num_heads + c.num_kv_heads), 1)
            queries.copy_(self._normed(queries, layer.query_norm))
            keys.copy_(self._normed(keys, layer.key_norm))
        rotate_(heads, c.num_heads + c.num_kv_heads, *rotation)
        heads = heads.to(self.dtype)
        return heads[:, : c.num_heads], heads[:, c.num_heads :]

    def _add_normed_(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return add_normed_(x, y, weight, self.config.rms_norm_eps)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    @staticmethod
    def parameters(config: ModelConfig) -> dict[str, Parameter]:
        """Parameters to load, with their checkpoint tensors, in order of use."""
        c = config
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        hidden, inner = c.hidden_size, c.intermediate_size

        def tensor(name: str, *shape: int) -> Parameter:
            return Parameter(Kind.TENSOR, (StoredPart(name, shape),))

        def linear(*names: str, out: tuple[int, ...], into: int, bias: bool = False) -> Parameter:
            sized = list(zip(names, out, strict=True))
            return Parameter(
                Kind.LINEAR,
                tuple(StoredPart(name + ".weight", (rows, into)) for name, rows in sized),
                tuple(StoredPart(name + ".bias", (rows,)) for name, rows in sized) if bias else (),
            )

        table = (StoredPart(EMBEDDING, (c.vocab_size, hidden)),)
        found = {"embedding": Parameter(Kind.EMBEDDING, table)}
        for i in range(c.num_layers):
            ours, theirs = f"layers.{i}.", f"model.layers.{i}."
            attention, mlp = theirs + "self_attn.", theirs + "mlp."
            found |= {
                ours + "attention_norm": tensor(theirs + "input_layernorm.weight", hidden),
                ours + "qkv": linear(
                    *(attention + name for name in ("q_proj", "k_proj", "v_proj")),
                    out=(q, kv, kv),
                    into=hidden,
                    bias=c.qkv_bias,
                ),
                ours + "output": linear(attention + "o_proj", out=(hidden,), into=q),
                ours + "mlp_norm": tensor(theirs + "post_attention_layernorm.weight", hidden),
                ours + "gate_up": Parameter(
                    Kind.GATED,
                    (
                        StoredPart(mlp + "gate_proj.weight", (inner, hidden)),
                        StoredPart(mlp + "up_proj.weight", (inner, hidden)),
                    ),
                ),
                ours + "down": linear(mlp + "down_proj", out=(hidden,), into=inner),
            }
            if c.qk_norm:
                found[ours + "query_norm"] = tensor(attention + "q_norm.weight", c.head_dim)
                found[ours + "key_norm"] = tensor(attention + "k_norm.weight", c.head_dim)
        found["norm"] = tensor("model.norm.weight", hidden)
        found["head"] = (
            Parameter(Kind.LINEAR, table)
            if c.tie_word_embeddings
            else linear(HEAD.removesuffix(".weight"), out=(c.vocab_size,), into=hidden)
        )
        return found

    @staticmethod
    def unused(config: ModelConfig) -> tuple[str, ...]:
        """Tensors that a checkpoint may contain although nothing reads them."""
        return (HEAD,) if config.tie_word_embeddings else ()


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer; norms are None if the family has none."""

    attention_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None

    @classmethod
    def from_weights(cls, weights: Weights, prefix: str) -> Self:
        """Make a layer from the weights whose names begin with ``prefix``."""
        tensors, linears = weights.tensors, weights.linears
        return cls(
            attention_norm=tensors[prefix + "attention_norm"],
            qkv=linears[prefix + "qkv"],
            output=linears[prefix + "output"],
            mlp_norm=tensors[prefix + "mlp_norm"],
            gate_up=linears[prefix + "gate_up"],
            down=linears[prefix + "down"],
            query_norm=tensors.get(prefix + "query_norm"),
            key_norm=tensors.get(prefix + "key_norm"),
        )


DECODER: Final = Decoder
"""The class that ``families`` uses from this module."""


def load_model(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    layout: Layout | None = None,
) -> Decoder:
    """Load the model of checkpoint directory ``path`` on ``device``. Raises ``CheckpointError``."""
    config = tied_as_stored(path, config)
    decoder = decoder_of(config)
    weights = load_weights(
        path,
        decoder.parameters(config),
        dtype,
        device,
        layout=layout,
        unused=decoder.unused(config),
    )
    return decoder(config, weights)


def decoder_of(config: ModelConfig) -> type[Decoder]:
    """The class that computes the architecture of ``config``, from ``families``."""
    found: type[Decoder] = import_module(FAMILIES[config.architecture].decoder).DECODER
    return found


def tied_as_stored(path: Path, config: ModelConfig) -> ModelConfig:
    """``config`` of checkpoint directory ``path``, corrected for the head in the files.

    A stored head is used even if the configuration ties it to the embedding, unless it is an exact
    copy, as in ``PreTrainedModel.tie_weights`` of transformers 5. Raises ``BrokenCheckpoint``.
    """
    if not config.tie_word_embeddings or not differ(path, EMBEDDING, HEAD):
        return config
    model_log.warning(
        "%s: config.json ties %s to %s, but the files hold both and they differ: both are used,"
        " as in transformers; set tie_word_embeddings to false there",
        path,
        HEAD,
        EMBEDDING,
    )
    return replace(config, tie_word_embeddings=False)


def parameter_count(config: ModelConfig) -> int:
    """Elements of all weights that a step reads: a tied embedding once, a separate one not."""
    parameters = decoder_of(config).parameters(config).values()
    return sum(p.elements for p in parameters if p.kind is not Kind.EMBEDDING)
