"""From a checkpoint to a model."""

from pathlib import Path
from typing import Protocol

import torch

from worker.attention import AttentionStep
from worker.models.config import ModelConfig
from worker.models.decoder import Decoder
from worker.models.loader import load_parameters


class Model(Protocol):
    """A decoder over a packed batch: the tokens of all rows of a step, one after the other."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionStep
    ) -> torch.Tensor:
        """``token_ids`` and ``positions`` [tokens] int64 → hidden states [tokens, hidden]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [rows, hidden] → float32 logits [rows, vocabulary]."""

    @property
    def parameter_bytes(self) -> int: ...


def load_model(path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Model:
    """The model of checkpoint directory ``path`` on ``device``. Raises ``CheckpointError``."""
    weights = load_parameters(
        path, Decoder.parameters(config), dtype, device, unused=Decoder.unused(config)
    )
    return Decoder(config, weights)
