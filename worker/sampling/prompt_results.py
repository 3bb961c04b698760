"""Results of a step for prompts: log-probabilities of their tokens, and whether they are finite.

The hidden state of each token except the last gives the next token's probabilities. Logits are
computed for a few hundred states at a time, and only the requested results are kept: all logits of
a long prompt would take more memory than the model.

If a token's state is not finite, neither is the state of any token that attends to it, so a row's
last token shows it for all. For rows that sample, the logits are checked (``Sampler``); for the
others, the last hidden state.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from protocol import PromptLogprobs
from worker.pinned import upload
from worker.scheduler.plan import Plan, Row

_MAX_LOGITS = 2**23
"""Maximum logits computed at a time: 32 MiB as float32, plus the same for log-probabilities."""
_MAX_TOKENS = 512
"""Maximum tokens scored at a time; their numbers are sent as one piece."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Scores of the tokens from position ``first`` on, for ``row`` of the plan; see
    ``PromptLogprobs``. Tensors [tokens], or [tokens, top] for ``top_values`` and ``top_ids``."""

    row: int
    first: int
    own: Tensor
    ranks: Tensor
    top_values: Tensor
    top_ids: Tensor


class PromptScores(NamedTuple):
    """Scores of the prompt tokens that a step processed, on the device."""

    pieces: list[_Piece]

    def on_its_way(self, send: Callable[[Tensor], Tensor]) -> "PromptScores":
        """A copy that the device is going to write to host memory; see ``Sampled``."""
        return PromptScores(
            [
                replace(
                    piece,
                    own=send(piece.own),
                    ranks=send(piece.ranks),
                    top_values=send(piece.top_values),
                    top_ids=send(piece.top_ids),
                )
                for piece in self.pieces
            ]
        )

    def read(self) -> dict[int, list[PromptLogprobs]]:
        """The log-probabilities by row. Waits for the device."""
        found: dict[int, list[PromptLogprobs]] = {}
        for piece in self.pieces:
            packed = PromptLogprobs(
                first=piece.first,
                top=piece.top_ids.shape[1],
                logprobs=_packed(piece.own, "<f4"),
                ranks=_packed(piece.ranks, "<i4"),
                top_ids=_packed(piece.top_ids, "<i4"),
                top_logprobs=_packed(piece.top_values, "<f4"),
            )
            found.setdefault(piece.row, []).append(packed)
        return found


def score_prompts(
    plan: Plan,
    hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    *,
    vocab_size: int,
    device: torch.device,
) -> PromptScores | None:
    """Score prompts from a step's ``hidden`` states [tokens, hidden]; None if no row asks for it.

    ``logits_of`` maps [rows, hidden] to float32 logits [rows, vocabulary].
    """
    pieces: list[_Piece] = []
    most = max(1, min(_MAX_TOKENS, _MAX_LOGITS // vocab_size))
    begin = plan.decodes  # these rows compute only their last token
    for index in range(plan.decodes, len(plan.rows)):
        row = plan.rows[index]
        if row.request.job.sampling.prompt_logprobs is not None:
            states = hidden[begin : begin + row.count]
            pieces += _pieces_of(index, row, states, logits_of, most, device)
        begin += row.count
    return PromptScores(pieces) if pieces else None


def _pieces_of(
    index: int,
    row: Row,
    hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    most: int,
    device: torch.device,
) -> Iterator[_Piece]:
    request, top = row.request, row.request.job.sampling.prompt_logprobs
    assert top is not None
    end = min(row.start + row.count, request.prompt_tokens - 1)
    for at in range(row.start, end, most):
        stop = min(at + most, end)
        logprobs = logits_of(hidden[at - row.start : stop - row.start]).log_softmax(dim=-1)
        next_ids = np.array(request.tokens[at + 1 : stop + 1], np.int64)
        own = logprobs.gather(1, upload(next_ids, device)[:, None])
        best = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
        yield _Piece(
            index,
            at + 1,
            own.squeeze(1),
            (logprobs >= own).sum(dim=-1, dtype=torch.int32),
            best.values,
            best.indices,
        )


def _packed(tensor: Tensor, dtype: str) -> bytes:
    return tensor.cpu().numpy().astype(dtype).tobytes()


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
