"""Makes embeddings: pools a prompt's hidden states, after the final norm, to one vector."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol import Pooling
from worker.scheduler.plan import Plan

Vector = NDArray[np.float32]


class PooledStates(NamedTuple):
    """What a step adds to embeddings of ``rows``: ``sums`` [rows, hidden] on the device."""

    rows: list[int]
    sums: Tensor

    def on_its_way(self, send: Callable[[Tensor], Tensor]) -> "PooledStates":
        """A copy that the device is going to write to host memory; see ``Sampled``."""
        return PooledStates(self.rows, send(self.sums))

    def read(self) -> dict[int, Vector]:
        """The sums by row. Waits for the device."""
        return dict(zip(self.rows, self.sums.cpu().numpy(), strict=True))


def pools_any(plan: Plan) -> bool:
    """Whether a row of this step is for an embedding."""
    return any(row.request.job.pooling for row in plan.rows)


def pool_states(plan: Plan, hidden: Tensor) -> PooledStates | None:
    """Pool a step's ``hidden`` states [tokens, hidden] by row: their sum, or only the last; None if
    no row asks."""
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
