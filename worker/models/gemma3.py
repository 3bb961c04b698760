"""Gemma 3: also norms after attention and MLP, a GELU gate, scaled embeddings, and separate rotary
wavelengths in layers with a window."""

import math
from dataclasses import replace
from typing import Final

from torch import Tensor
from torch.nn.functional import gelu

from worker.models.config import ModelConfig
from worker.models.loader import Weights
from worker.models.model import AngleTable, Decoder, Rotation
from worker.models.parameters import Kind, Parameter, StoredPart

_NORMS: Final = {
    "mlp_norm": "pre_feedforward",
    "attention_end_norm": "post_attention",
    "mlp_end_norm": "post_feedforward",
}


class Gemma3Decoder(Decoder):
    """See ``Decoder``."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        for name, tensor in weights.tensors.items():
            if name != "embedding":
                weights.tensors[name] = tensor + 1  # norms are stored minus 1
        super().__init__(config, weights)
        self._ends = [
            [weights.tensors[f"layers.{i}.{part}_end_norm"] for part in ("attention", "mlp")]
            for i in range(config.num_layers)
        ]
        local = replace(config, rope_theta=config.local_rope_theta, rope_scaling=None)
        self._local = Rotation(local, self._embedding.device, self._dtype)

    def embedded(self, token_ids: Tensor) -> Tensor:
        return super().embedded(token_ids) * math.sqrt(self.config.hidden_size)

    def _rotations(self, positions: Tensor) -> list[AngleTable]:
        whole, local = self.rotation.at(positions), self._local.at(positions)
        return [local if window else whole for window in self.config.windows]

    def _mixed(self, i: int, mixed: Tensor) -> Tensor:
        return self._normed(super()._mixed(i, mixed), self._ends[i][0])

    def _mlp(self, i: int, x: Tensor) -> Tensor:
        gate, up = self.layers[i].gate_up(x).chunk(2, dim=-1)
        return self._normed(
            self.layers[i].down(gelu(gate, approximate="tanh").mul_(up)), self._ends[i][1]
        )

    @staticmethod
    def parameters(config: ModelConfig) -> dict[str, Parameter]:
        found = Decoder.parameters(config)
        for i in range(config.num_layers):
            for ours, theirs in _NORMS.items():
                name = f"model.layers.{i}.{theirs}_layernorm.weight"
                part = StoredPart(name, (config.hidden_size,))
                found[f"layers.{i}.{ours}"] = Parameter(Kind.TENSOR, (part,))
            both = found[f"layers.{i}.gate_up"]
            found[f"layers.{i}.gate_up"] = Parameter(Kind.LINEAR, both.parts)
        return found


DECODER: Final = Gemma3Decoder
