"""Sets logits of tokens that may not come to minus infinity."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.grammar.masks import Masks
from worker.pinned import upload


def apply_(logits: Tensor, masks: Masks) -> None:
    """Mask the rows of ``logits`` [rows, vocabulary] that are in ``masks``."""
    if logits.device.type == "cpu":
        _apply_on_cpu(logits.numpy(), masks)
        return
    rows = upload(masks.rows, logits.device)
    words = upload(masks.words.view(np.int32), logits.device)
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    barred = ((words[:, :, None] >> bits) & 1).reshape(len(rows), -1) == 0
    mine = logits[rows].masked_fill_(barred[:, : logits.shape[-1]], -torch.inf)
    logits.index_copy_(0, rows, mine)


def _apply_on_cpu(logits: NDArray[np.float32], masks: Masks) -> None:
    for row, words in zip(masks.rows, masks.words, strict=True):
        bits = np.unpackbits(words.view(np.uint8), count=logits.shape[-1], bitorder="little")
        np.copyto(logits[row], -np.inf, where=bits == 0)
