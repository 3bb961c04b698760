"""How much a task may generate: ``max_tokens`` and sampling, limited by what its model can do."""

import msgspec

from orchestrator.errors import ContextOverflow, InvalidRequest
from orchestrator.tasks.job import Job
from orchestrator.tasks.task import Task
from protocol import InvalidSampling, ModelCard


def settle_sampling(task: Task, card: ModelCard, default_max_tokens: int) -> None:
    """Fill in the model's defaults, and fit ``max_tokens`` to the context.

    Raises ``ContextOverflow`` or ``InvalidRequest``.
    """
    context, prompt = card.context_tokens, len(task.token_ids)
    left = context - prompt
    if left < 1:
        raise ContextOverflow.of_prompt(prompt, context, card.context_note)
    asked = task.job.max_tokens
    if asked is not None and asked > left and task.job.cuts_max_tokens:
        asked = left
    if asked is not None and asked > left:
        raise ContextOverflow.of_answer(prompt, asked, context, card.context_note)
    defaults = card.sampling_defaults
    sampling = defaults.fill(task.sampling, task.job.unstated)
    wanted = asked
    if wanted is None:
        most = usual_tokens(task.job, card, default_max_tokens)
        wanted = min(left, max(most, sampling.min_tokens))
    # A ``top_k`` beyond the vocabulary is the same as all of it, and need not fit in 64 bits.
    top_k = sampling.top_k if sampling.top_k < card.vocab_size else 0
    sampling = msgspec.structs.replace(sampling, max_tokens=wanted, top_k=top_k)
    try:
        sampling.check(card.vocab_size)
    except InvalidSampling as error:
        raise InvalidRequest(str(error), field=error.field) from None
    task.sampling = sampling


def usual_tokens(job: Job, card: ModelCard, default_max_tokens: int) -> int:
    """How much a job that states no ``max_tokens`` generates where the context holds it."""
    most = job.default_max_tokens or default_max_tokens
    limit = card.sampling_defaults.max_tokens
    return most if limit is None else min(most, limit)
