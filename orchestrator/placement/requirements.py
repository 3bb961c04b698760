"""The requirements that a task has of an instance."""

from dataclasses import dataclass

from orchestrator.instances.candidate import Candidate
from orchestrator.tasks.job import PlacementConstraint
from protocol import Adapter, Feature

ANYWHERE = PlacementConstraint()
NOTHING: frozenset[Feature] = frozenset()


@dataclass(frozen=True, slots=True)
class Requirements:
    """Properties that an instance must have; tasks with equal ones can go to the same instances."""

    model: str
    vocabulary: bytes
    tokens: int = 0
    """Length of prompt and longest answer together, in tokens."""
    constraint: PlacementConstraint = ANYWHERE
    resumes: bool = False
    """Whether the task goes on with a paused job, whose KV is where the constraint says."""

    has_grammar: bool = False
    model_digest: str | None = None
    """Digest of the weights that began the text; None if no text has begun."""
    needs_continue: bool = False
    """Whether only workers that take up any text can go on with the task's text."""
    features: frozenset[Feature] = NOTHING
    """Features that the engine must have."""
    adapter: Adapter | None = None
    """LoRA adapter that it must serve, with these very weights; None for the model alone."""

    def allows(self, candidate: Candidate) -> bool:
        """Whether ``candidate`` could ever take the task, however busy it is now."""
        if candidate.model != self.model or candidate.vocabulary != self.vocabulary:
            return False
        if self.has_grammar and not candidate.has_grammars:
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
        """Whether ``candidate`` meets the client's placement constraint."""
        asked = self.constraint
        return (
            asked.allows(candidate.name)
            and (not asked.quantization or candidate.quantization in asked.quantization)
            and candidate.vram_bytes >= asked.vram_bytes
            and candidate.compute_capability >= asked.compute_capability
        )


@dataclass(frozen=True, slots=True)
class Demand:
    """A task's requirements and work. ``home`` is where its conversation was, or empty."""

    requirements: Requirements
    prompt_tokens: int = 1
    output_tokens: int = 1
    home: str = ""
