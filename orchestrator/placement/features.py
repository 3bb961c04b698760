"""The engine features that a task needs: pure functions."""

from orchestrator.tasks.job import Job
from orchestrator.tasks.task import Task
from protocol import Feature, OnDeadline, Sampling
from protocol import features_of as sampling_features

NOTHING: frozenset[Feature] = frozenset()

FIELDS = {
    Feature.EMBEDDINGS: "input",
    Feature.FINISH: "on_deadline",
    Feature.GRAMMAR: "grammar",
    Feature.IGNORE_EOS: "ignore_eos",
    Feature.IMAGES: "messages",
    Feature.LOGIT_BIAS: "logit_bias",
    Feature.LOGPROBS: "logprobs",
    Feature.MIN_P: "min_p",
    Feature.MIN_TOKENS: "min_tokens",
    Feature.PROMPT_LOGPROBS: "prompt_logprobs",
    Feature.SEED: "seed",
    Feature.SPECIAL_TEXT: "skip_special_tokens",
    Feature.STOP_TOKEN_IDS: "stop_token_ids",
}
"""The request field that asks for a feature, for features that one field alone asks for."""


def features_of(job: Job, sampling: Sampling, *, has_images: bool = False) -> frozenset[Feature]:
    """Features that ``job`` needs. ``sampling`` is the job's as admission settled it.

    A conversation's kept KV and the news of a prefix cache are never needed: they spare work. Nor
    is a seed that we made up ourselves, so that a text can go on elsewhere.
    """
    needed = [*job.placement.capabilities, *sampling_features(sampling)]
    if job.embeds:
        needed.append(Feature.EMBEDDINGS)
    if job.on_deadline is OnDeadline.FINISH:
        needed.append(Feature.FINISH)
    if job.grammar is not None:
        needed.append(Feature.GRAMMAR)
    if has_images:
        needed.append(Feature.IMAGES)
    if job.sampling.seed is not None and sampling.temperature:
        needed.append(Feature.SEED)
    if job.needs_ids or job.durable:  # what is written down is taken up again by its ids
        needed.append(Feature.TOKEN_IDS)
    return frozenset(needed) if needed else NOTHING


def features_now(task: Task) -> frozenset[Feature]:
    """Features that ``task`` needs as it stands; a text that has begun also needs token ids."""
    if task.begun_by_weights is None:
        return task.features
    return task.features | {Feature.TOKEN_IDS}
