"""Loads a model from a checkpoint."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Protocol

import torch

from worker.attention import AttentionStep
from worker.log import model_log
from worker.models.checkpoint import differ
from worker.models.config import ModelConfig
from worker.models.decoder import EMBEDDING, HEAD, Decoder
from worker.models.families import FAMILIES
from worker.models.loader import Layout, load_weights
from worker.models.parameters import Kind


class Model(Protocol):
    """A decoder over a packed batch: the tokens of all rows of a step, one after the other."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionStep
    ) -> torch.Tensor:
        """Map ``token_ids`` and ``positions`` [tokens] int64 to hidden states [tokens, hidden]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states [rows, hidden] to float32 logits [rows, vocabulary]."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of its weights and of the KV pool."""

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a step reads at least."""

    @property
    def tile_rows(self) -> int:
        """See ``linear.Format``."""

    @property
    def products(self) -> str:
        """Name of the kind of linear layers: each rounds in its own way."""


def load_model(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    layout: Layout | None = None,
) -> Model:
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
    """The class that computes the architecture of ``config``, by ``families``."""
    found: type[Decoder] = import_module(FAMILIES[config.architecture].decoder).DECODER
    return found


def tied_as_stored(path: Path, config: ModelConfig) -> ModelConfig:
    """``config`` of checkpoint directory ``path``, corrected for the head that the files have.

    A stored head counts even where the configuration ties it to the embedding, unless it is a mere
    copy, as in ``PreTrainedModel.tie_weights`` of transformers 5. Raises ``BrokenCheckpoint``.
    """
    if not config.tie_word_embeddings or not differ(path, EMBEDDING, HEAD):
        return config
    model_log.warning(
        "%s: config.json ties %s to %s, but the files hold both and they differ: they stay two,"
        " as in transformers; set tie_word_embeddings to false there",
        path,
        HEAD,
        EMBEDDING,
    )
    return replace(config, tie_word_embeddings=False)


def parameter_count(config: ModelConfig) -> int:
    """Elements of all weights that a step reads: a tied embedding once, a separate one never."""
    parameters = decoder_of(config).parameters(config).values()
    return sum(p.elements for p in parameters if p.kind is not Kind.EMBEDDING)
