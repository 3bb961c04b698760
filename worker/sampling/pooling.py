"""Embeddings: a prompt's last hidden states, behind the final norm, pooled to one vector."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.protocol import Pooling
from worker.scheduler.plan import Plan

Vector = NDArray[np.float32]


class PooledStates(NamedTuple):
    """Of the ``rows`` of a step that pool, what it adds: ``sums`` [rows, hidden], on the device."""

    rows: list[int]
    sums: Tensor

    def on_its_way(self, send: Callable[[Tensor], Tensor]) -> "PooledStates":
        """A copy that the device is going to write to host memory; see ``Sampled``."""
        return PooledStates(self.rows, send(self.sums))

    def read(self) -> dict[int, Vector]:
        """By row. Waits for them."""
        return dict(zip(self.rows, self.sums.cpu().numpy(), strict=True))


def pools_any(plan: Plan) -> bool:
    """Whether a row of this step is an embedding's."""
    return any(row.request.job.pooling for row in plan.rows)


def pool_states(plan: Plan, hidden: Tensor) -> PooledStates | None:
    """Of a step's ``hidden`` states [tokens, hidden]: their sum, or the last one's alone."""
    rows: list[int] = []
    sums: list[Tensor] = []
    begin = 0
    for index, row in enumerate(plan.rows):
        states = hidden[begin : begin + row.count]
        begin += row.count
        pooling = row.request.job.pooling
        if pooling is Pooling.MEAN:
            rows.append(index)
            sums.append(states.float().sum(dim=0))
        elif pooling is Pooling.LAST and row.samples:
            rows.append(index)
            sums.append(states[-1].float())
    return PooledStates(rows, torch.stack(sums)) if rows else None
