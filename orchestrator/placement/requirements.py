"""A task's requirements on an instance, including engine features."""

from dataclasses import dataclass

from orchestrator.instances.candidate import Candidate
from orchestrator.tasks.job import Job, PlacementConstraint
from orchestrator.tasks.task import Task
from protocol import Adapter, Feature, OnDeadline, Sampling
from protocol import features_of as sampling_features

ANYWHERE = PlacementConstraint()
NOTHING: frozenset[Feature] = frozenset()


@dataclass(frozen=True, slots=True)
class Requirements:
    """Properties that an instance must have; tasks with equal ones fit the same instances."""

    model: str
    vocabulary: bytes
    tokens: int
    """Tokens of the prompt plus the longest answer."""
    constraint: PlacementConstraint = ANYWHERE
    resumes: bool = False
    """Whether the task resumes a paused job, whose KV is on the instance of the constraint."""

    model_digest: str | None = None
    """Digest of the weights that generated the partial text; None if there is none."""
    needs_continue: bool = False
    """Whether only workers that can continue any text can continue the task's text."""
    features: frozenset[Feature] = NOTHING
    """Features that the engine must have."""
    adapter: Adapter | None = None
    """LoRA adapter that it must serve, with identical weights; None for the plain model."""

    def allows(self, candidate: Candidate) -> bool:
        """Whether ``candidate`` could ever take the task, even if it is busy now."""
        if candidate.model != self.model or candidate.vocabulary != self.vocabulary:
            return False
        if self.model_digest is not None and self.model_digest != candidate.model_digest:
            return False
        if self.needs_continue and not candidate.can_continue:
            return False
        if self.adapter is not None and self.adapter not in candidate.adapters:
            return False
        if self.tokens > candidate.max_tokens:
            return False
        if not self.features.isdisjoint(candidate.lacks):
            return False
        return self.constraint is ANYWHERE or self._suits(candidate)

    def _suits(self, candidate: Candidate) -> bool:
        asked = self.constraint
        return (
            asked.allows(candidate.name)
            and (not asked.quantization or candidate.quantization in asked.quantization)
            and candidate.vram_bytes >= asked.vram_bytes
            and candidate.compute_capability >= asked.compute_capability
        )


@dataclass(frozen=True, slots=True)
class Demand:
    """A task's requirements and work. ``home`` is its conversation's last instance, or empty."""

    requirements: Requirements
    prompt_tokens: int
    output_tokens: int
    home: str = ""


FIELDS = {
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
"""The request field that needs a feature, for features that only one field needs."""


def features_of(job: Job, sampling: Sampling, *, has_images: bool = False) -> frozenset[Feature]:
    """Features that ``job`` needs. ``sampling`` is the job's sampling after admission.

    Kept KV and prefix cache reports are never needed: they only save work. A seed that the service
    drew, to continue a text elsewhere, is not needed either.
    """
    needed = [*job.placement.capabilities, *sampling_features(sampling)]
    if job.on_deadline is OnDeadline.FINISH:
        needed.append(Feature.FINISH)
    if job.grammar is not None:
        needed.append(Feature.GRAMMAR)
    if has_images:
        needed.append(Feature.IMAGES)
    if job.sampling.seed is not None and sampling.temperature:
        needed.append(Feature.SEED)
    if job.needs_ids or job.durable:  # a journaled text continues from its ids
        needed.append(Feature.TOKEN_IDS)
    return frozenset(needed) if needed else NOTHING


def requirements_of(task: Task, tokens: int) -> Requirements:
    """The requirements of ``task`` to start or to continue, with a length of ``tokens``."""
    has_begun = task.begun_by_weights is not None
    return Requirements(
        task.model,
        task.vocabulary,
        tokens,
        task.job.placement,
        model_digest=task.begun_by_weights,
        needs_continue=task.needs_continue,
        features=task.features | {Feature.TOKEN_IDS} if has_begun else task.features,
        adapter=task.adapter,
    )
