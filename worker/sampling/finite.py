"""Checks whether a step's results for prompts are finite, for rows without logits.

If a token's state is not finite, neither is that of any token that attends to it, so that a row's
last token tells for all. For rows that sample the logits are checked (``Sampler``); for the others
the last hidden state.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker.pinned import upload
from worker.scheduler.plan import Plan


class CheckedRows(NamedTuple):
    """``rows`` of a step's plan, and which of them are ``finite`` [rows], on the device."""

    rows: list[int]
    finite: Tensor

    def on_its_way(self, send: Callable[[Tensor], Tensor]) -> "CheckedRows":
        """A copy that the device is going to write to host memory; see ``Sampled``."""
        return CheckedRows(self.rows, send(self.finite))

    def read(self) -> list[int]:
        """Rows that are not finite. Waits for the device."""
        finite = self.finite.tolist()
        return [row for row, is_finite in zip(self.rows, finite, strict=True) if not is_finite]


def check_prompts(plan: Plan, hidden: Tensor) -> CheckedRows | None:
    """Check a step's ``hidden`` states [tokens, hidden]; None where every row samples."""
    rows: list[int] = []
    last_tokens: list[int] = []
    end = plan.decodes
    for index in range(plan.decodes, len(plan.rows)):
        end += plan.rows[index].count
        if not plan.rows[index].samples:
            rows.append(index)
            last_tokens.append(end - 1)
    if not rows:
        return None
    last = hidden[upload(np.array(last_tokens, np.int64), hidden.device)]
    return CheckedRows(rows, torch.isfinite(last).all(dim=-1))
