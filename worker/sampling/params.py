"""Sampling parameters of the requests in the runner's slots, one entry per slot.

Filled once when a request gets its slot; a step gathers its rows without a Python loop.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from worker.scheduler.request import Request

DRAWS: Final = 1
PENALISED: Final = 2
BIASED: Final = 4
WANTS_LOGPROBS: Final = 8
CONSTRAINED: Final = 16

_COLDEST: Final = 1e-5
"""Temperature below which a row is greedy, as it nearly is; lower ones would overflow logits."""


@dataclass(frozen=True, slots=True)
class SamplingTable:
    """Parameters as arrays [slots]; see ``Sampling`` for those that have its names."""

    needs: NDArray[np.uint8]
    """The parts of the pass that a row needs besides the argmax: the flags above, or'ed."""
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    repetition_penalty: NDArray[np.float32]
    presence_penalty: NDArray[np.float32]
    frequency_penalty: NDArray[np.float32]
    seed: NDArray[np.uint64]
    logprobs: NDArray[np.int64]
    first_free_position: NDArray[np.int64]
    """First position at which end-of-sequence may come (``min_tokens``)."""

    @classmethod
    def empty(cls, slots: int) -> "SamplingTable":
        return cls(
            needs=np.zeros(slots, np.uint8),
            temperature=np.zeros(slots, np.float32),
            top_k=np.zeros(slots, np.int64),
            top_p=np.ones(slots, np.float32),
            min_p=np.zeros(slots, np.float32),
            repetition_penalty=np.ones(slots, np.float32),
            presence_penalty=np.zeros(slots, np.float32),
            frequency_penalty=np.zeros(slots, np.float32),
            seed=np.zeros(slots, np.uint64),
            logprobs=np.zeros(slots, np.int64),
            first_free_position=np.zeros(slots, np.int64),
        )

    def fill(self, slot: int, request: Request) -> int:
        """Enter the parameters of ``request``; returns its ``needs``."""
        asked = request.job.sampling
        self.temperature[slot] = asked.temperature
        self.top_k[slot] = asked.top_k
        self.top_p[slot] = asked.top_p
        self.min_p[slot] = asked.min_p
        self.repetition_penalty[slot] = asked.repetition_penalty
        self.presence_penalty[slot] = asked.presence_penalty
        self.frequency_penalty[slot] = asked.frequency_penalty
        self.seed[slot] = request.seed
        self.logprobs[slot] = asked.logprobs or 0
        # A grammar may allow only the end, which must not be barred: masks see to ``min_tokens``.
        least = 0 if request.job.constraint is not None else asked.min_tokens
        self.first_free_position[slot] = request.prompt_tokens + least
        penalised = (
            asked.repetition_penalty != 1 or asked.presence_penalty or asked.frequency_penalty
        )
        needs = (
            (DRAWS if asked.temperature >= _COLDEST else 0)
            | (PENALISED if penalised else 0)
            | (BIASED if asked.logit_bias else 0)
            | (WANTS_LOGPROBS if asked.logprobs is not None else 0)
            | (CONSTRAINED if request.job.constraint is not None else 0)
        )
        self.needs[slot] = needs
        return needs
