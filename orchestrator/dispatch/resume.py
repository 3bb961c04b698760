"""Whether and how a text that has begun goes on at another instance (OR-10).

The prompt and what was generated so far are sent as the prompt. A worker's random numbers come from
seed and position in the text, and its text stage decodes what it generates as the continuation of a
prompt, so nothing is lost, repeated or drawn differently.
"""

from collections.abc import Sequence

import msgspec

from orchestrator.instances.instance import Instance
from orchestrator.prompts.encoder import PromptEncoder
from orchestrator.tasks.task import Task
from worker.protocol import FinishReason, Sampling


def is_resumable(sampling: Sampling) -> bool:
    """Whether what is drawn next depends on nothing but the text, its length and the seed."""
    return (
        sampling.max_tokens > 0
        and sampling.prompt_logprobs is None
        and (sampling.temperature == 0 or sampling.seed is not None)
        and not sampling.stop
        and not sampling.stop_token_ids
        and sampling.skip_special_tokens
        and sampling.logprobs is None
        and sampling.repetition_penalty == 1
        and sampling.presence_penalty == 0
        and sampling.frequency_penalty == 0
    )


def remaining_request(task: Task) -> tuple[list[int], Sampling]:
    """What to send for a task: prompt and parameters, less what it has generated already."""
    if not task.completion_tokens:
        return list(task.token_ids), task.sampling
    assert task.is_resumable and task.transcript is not None
    made = len(task.transcript.ids)
    rest = msgspec.structs.replace(
        task.sampling,
        max_tokens=task.sampling.max_tokens - made,
        min_tokens=max(0, task.sampling.min_tokens - made),
    )
    return [*task.token_ids, *task.transcript.ids], rest


def finish_of_complete_text(task: Task, lost: Instance | None) -> FinishReason | None:
    """How a text ended that lacks nothing but the end from its worker, which is ``lost``; None for
    any other text.
    """
    if lost is None or lost.encoder is None or not _is_known(task, lost.encoder):
        return None
    assert task.transcript is not None
    sampling, ids = task.sampling, task.transcript.ids
    if ids and ids[-1] in lost.encoder.card.eos_token_ids and not sampling.ignore_eos:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(ids) >= sampling.max_tokens else None


def can_resume(task: Task, lost: Instance | None, ready: Sequence[Instance]) -> bool:
    """Whether all that was generated is known, and all that are ready have the same weights."""
    if lost is None or lost.encoder is None or not _is_known(task, lost.encoder):
        return False
    digest = lost.encoder.card.model_digest
    return all(i.card is not None and i.card.model_digest == digest for i in ready)


def _is_known(task: Task, encoder: PromptEncoder) -> bool:
    """Whether every id and every half character that the worker generated has come."""
    transcript = task.transcript
    return (
        task.is_resumable
        and transcript is not None
        and len(transcript.ids) == task.completion_tokens
        and encoder.tokens.text_of(transcript.ids) == transcript.text()
    )
