"""What a task needs an engine to be able to do: pure."""

from orchestrator.tasks.job import Job
from orchestrator.tasks.task import Task
from worker.protocol import Feature, Sampling
from worker.protocol import features_of as sampling_features

NOTHING: frozenset[Feature] = frozenset()

FIELDS = {
    Feature.EMBEDDINGS: "input",
    Feature.GRAMMAR: "grammar",
    Feature.IGNORE_EOS: "ignore_eos",
    Feature.LOGIT_BIAS: "logit_bias",
    Feature.LOGPROBS: "logprobs",
    Feature.MIN_P: "min_p",
    Feature.MIN_TOKENS: "min_tokens",
    Feature.PROMPT_LOGPROBS: "prompt_logprobs",
    Feature.SEED: "seed",
    Feature.SPECIAL_TEXT: "skip_special_tokens",
    Feature.STOP_TOKEN_IDS: "stop_token_ids",
}
"""The field of a request that asks for it, where one alone does."""


def features_of(job: Job, sampling: Sampling) -> frozenset[Feature]:
    """What of it an engine may lack. ``sampling`` is the job's as admission settled it.

    A conversation's kept KV and the news of a prefix cache are never needed: they spare work. Nor
    is a seed that we made up ourselves, so that a text can go on elsewhere.
    """
    needed = [*job.placement.capabilities, *sampling_features(sampling)]
    if job.embeds:
        needed.append(Feature.EMBEDDINGS)
    if job.grammar is not None:
        needed.append(Feature.GRAMMAR)
    if job.sampling.seed is not None and sampling.temperature:
        needed.append(Feature.SEED)
    if job.needs_ids or job.durable:  # what is written down is taken up again by its ids
        needed.append(Feature.TOKEN_IDS)
    return frozenset(needed) if needed else NOTHING


def features_now(task: Task) -> frozenset[Feature]:
    """The same of a task as it stands: a text that has begun goes on by its tokens' ids."""
    if task.begun_by_weights is None:
        return task.features
    return task.features | {Feature.TOKEN_IDS}
