"""Results of a step for prompts: log-probabilities of their tokens, and whether they are finite.

The hidden state of each token except the last gives the next token's probabilities. Logits are
computed for a few hundred states at a time, and only the requested results are kept: all logits of
a long prompt would take more memory than the model.

If a token's state is not finite, neither is the state of any token that attends to it, so a row's
last token shows it for all. For rows that sample, the logits are checked (``Sampler``); for the
others, the last hidden state.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from protocol import PromptLogprobs
from worker.pinned import download, upload
from worker.sampling.sampler import TokenScores
from worker.scheduler.plan import Plan, Row

_MAX_LOGITS = 2**23
"""Maximum logits computed at a time: 32 MiB as float32, plus the same for log-probabilities."""
_MAX_TOKENS = 512
"""Maximum tokens scored at a time; their numbers are sent as one piece."""


class PromptScores(NamedTuple):
    """Scores of the prompt tokens from position ``first`` on, for ``row`` of the plan."""

    row: int
    first: int
    scores: TokenScores

    def on_its_way(self) -> "PromptScores":
        """See ``Sampled.on_its_way``."""
        return self._replace(scores=self.scores.on_its_way())


def read_prompts(pieces: Iterable[PromptScores]) -> dict[int, list[PromptLogprobs]]:
    """The log-probabilities by row. Waits for the device."""
    found: dict[int, list[PromptLogprobs]] = {}
    for row, first, scores in pieces:
        packed = PromptLogprobs(
            first=first,
            top=scores.top_ids.shape[1],
            logprobs=_packed(scores.own, "<f4"),
            ranks=_packed(scores.ranks, "<i4"),
            top_ids=_packed(scores.top_ids, "<i4"),
            top_logprobs=_packed(scores.top_values, "<f4"),
        )
        found.setdefault(row, []).append(packed)
    return found


def score_prompts(
    plan: Plan,
    hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    *,
    vocab_size: int,
    device: torch.device,
) -> list[PromptScores]:
    """Score the prompts that ask for it from a step's ``hidden`` states [tokens, hidden].

    ``logits_of`` maps [rows, hidden] to float32 logits [rows, vocabulary].
    """
    pieces: list[PromptScores] = []
    most = max(1, min(_MAX_TOKENS, _MAX_LOGITS // vocab_size))
    begin = plan.decodes  # these rows compute only their last token
    for index in range(plan.decodes, len(plan.rows)):
        row = plan.rows[index]
        if row.request.job.sampling.prompt_logprobs is not None:
            states = hidden[begin : begin + row.count]
            pieces += _pieces_of(index, row, states, logits_of, most, device)
        begin += row.count
    return pieces


def _pieces_of(
    index: int,
    row: Row,
    hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    most: int,
    device: torch.device,
) -> Iterator[PromptScores]:
    request, top = row.request, row.request.job.sampling.prompt_logprobs
    assert top is not None
    end = min(row.start + row.count, request.prompt_tokens - 1)
    for at in range(row.start, end, most):
        stop = min(at + most, end)
        logprobs = logits_of(hidden[at - row.start : stop - row.start]).log_softmax(dim=-1)
        next_ids = np.array(request.tokens[at + 1 : stop + 1], np.int64)
        yield PromptScores(index, at + 1, TokenScores.of(logprobs, upload(next_ids, device), top))


def _packed(tensor: Tensor, dtype: str) -> bytes:
    return tensor.cpu().numpy().astype(dtype).tobytes()


class CheckedRows(NamedTuple):
    """``rows`` of a step's plan, and which of them are ``finite`` [rows], on the device."""

    rows: list[int]
    finite: Tensor

    def on_its_way(self) -> "CheckedRows":
        """See ``Sampled.on_its_way``."""
        return CheckedRows(self.rows, download(self.finite))

    def read(self) -> list[int]:
        """Rows that are not finite. Waits for the device."""
        finite = self.finite.tolist()
        return [row for row, is_finite in zip(self.rows, finite, strict=True) if not is_finite]


def check_prompts(plan: Plan, hidden: Tensor) -> CheckedRows | None:
    """Check a step's ``hidden`` states [tokens, hidden]; None if every row samples."""
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
