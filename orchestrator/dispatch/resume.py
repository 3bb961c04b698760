"""Decides whether and how a partial text continues on another instance (OR-10).

The new prompt is the old one plus the tokens generated so far. A worker's random numbers depend on
the seed and the position in the text, and its text stage decodes new tokens as a continuation of a
prompt. So no token is lost, repeated or sampled differently. If the client states no seed and the
text could continue, the orchestrator draws one for all attempts.

Stop strings, penalties and half characters depend on the generated tokens: they need a worker that
is told where the answer begins (``ModelCard.can_continue``). Other engines sample differently when
a text continues, with or without a seed, and get no seed from the orchestrator.
"""

import random
from collections.abc import Collection

import msgspec

from orchestrator.instances.instance import Instance
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.task import Task
from protocol import Feature, FinishReason, ModelCard, Outcome, Sampling


def with_seed(sampling: Sampling, rng: random.Random) -> Sampling:
    """``sampling`` with a new seed if it samples and the client gave none."""
    if sampling.temperature == 0 or sampling.seed is not None:
        return sampling
    return msgspec.structs.replace(sampling, seed=rng.getrandbits(63))


def is_resumable(sampling: Sampling) -> bool:
    """Whether the next token depends only on the text, its length and the seed."""
    return sampling.max_tokens > 0 and (sampling.temperature == 0 or sampling.seed is not None)


def looks_back(sampling: Sampling) -> bool:
    """Whether the next token depends on where in the text the answer begins."""
    return bool(
        sampling.stop
        or sampling.stop_token_ids
        or not sampling.skip_special_tokens
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1
    )


def remaining_request(task: Task) -> tuple[list[int], Sampling]:
    """The token ids and parameters to send for a task, without the work already generated."""
    if not task.completion_tokens:
        return list(task.token_ids), task.sampling
    assert task.is_resumable and task.transcript is not None
    made = len(task.transcript.ids)
    rest = msgspec.structs.replace(
        task.sampling,
        max_tokens=task.sampling.max_tokens - made,
        min_tokens=max(0, task.sampling.min_tokens - made),
        prompt_logprobs=None,  # they came before the first token
    )
    return [*task.token_ids, *task.transcript.ids], rest


def ending_of_complete_text(task: Task, lost: Instance | None) -> Ending | None:
    """The ending of a complete text that lacks only the ``End`` of its worker, ``lost``.

    None for any other text, and if only a worker can tell whether it is complete.
    """
    if lost is None or lost.encoder is None or not _has_all_ids(task, lost):
        return None
    assert task.transcript is not None
    sampling, ids = task.sampling, task.transcript.ids
    if not ids:
        return None
    has_stop_token = ids[-1] in sampling.stop_token_ids  # not part of the text
    text = lost.encoder.tokens.text_of(ids[:-1] if has_stop_token else ids)
    if text != task.transcript.text():
        return None
    if has_stop_token:
        return Ending(Outcome.MET, FinishReason.STOP, stop_token_id=ids[-1])
    if _ends_with_token(lost.encoder.card, sampling, ids):
        return Ending(Outcome.MET, FinishReason.STOP)
    is_full = len(ids) >= sampling.max_tokens
    return Ending(Outcome.MET, FinishReason.LENGTH) if is_full else None


def can_resume(task: Task, lost: Instance | None) -> bool:
    """Whether enough of the generated text is known to continue it."""
    if lost is None or lost.encoder is None or not _has_all_ids(task, lost):
        return False
    assert task.transcript is not None
    return lost.encoder.card.can_continue or not needs_continue(task, lost)


def needs_continue(task: Task, lost: Instance) -> bool:
    """Whether only a worker that can continue any text continues exactly as ``lost`` would have."""
    assert lost.encoder is not None and task.transcript is not None
    ids = task.transcript.ids
    return (
        looks_back(task.sampling)
        or len(ids) >= task.sampling.max_tokens
        or _ends_with_token(lost.encoder.card, task.sampling, ids)
        or lost.encoder.tokens.text_of(ids) != task.transcript.text()
    )


def _has_all_ids(task: Task, lost: Instance) -> bool:
    transcript = task.transcript
    assert lost.encoder is not None
    return (
        task.is_resumable
        and Feature.TOKEN_IDS not in lost.encoder.card.lacks
        and transcript is not None
        and len(transcript.ids) == task.completion_tokens
    )


def _ends_with_token(card: ModelCard, sampling: Sampling, ids: list[int]) -> bool:
    ends: Collection[int] = () if sampling.ignore_eos else card.eos_token_ids
    return bool(ids) and ids[-1] in ends
