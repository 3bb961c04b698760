"""What placement looks at: instances at one moment, and what a task asks of them."""

from dataclasses import dataclass

from orchestrator.prediction import StepUnderLoad
from orchestrator.tasks.task import PlacementWish

UNLIMITED = 2**62
ANYWHERE = PlacementWish()


@dataclass(frozen=True, slots=True)
class Candidate:
    """An instance as placement sees it.

    ``vocabulary`` names the tokenizer: token ids only mean something to one that has the same.
    ``slots`` is how many jobs it is sent before they wait here, ``load`` how many it has.
    ``most_tokens`` bounds a prompt and its answer together, by context and by KV memory.
    ``kv_free`` is in blocks. Without a ``pace`` nothing is known of its speed.
    """

    name: str
    model: str
    vocabulary: bytes
    ready: bool
    slots: int
    load: int
    most_tokens: int = UNLIMITED
    kv_free: int = 0
    pace: StepUnderLoad | None = None
    device: str = ""
    rows: int = 0
    """How many jobs run at once, by rows and KV memory; more wait in the worker."""
    most_rows: int = 0
    """How many may run for a paused job, whose KV is there, to go on."""
    is_up: bool = True
    """Whether its jobs go on, though it may take no new ones."""

    @property
    def free(self) -> int:
        return self.slots - self.load

    @property
    def has_room(self) -> bool:
        """Whether it takes one more job now."""
        return self.ready and self.load < self.slots

    @property
    def idles(self) -> bool:
        """Whether one more job would run at once."""
        return self.ready and self.load < (self.rows or self.slots)

    @property
    def can_resume(self) -> bool:
        """Whether a job whose KV it holds would run at once."""
        # It goes on before all that wait in the worker: it may be sent whenever they may.
        return self.is_up and self.load < max(self.most_rows, self.slots)


@dataclass(frozen=True, slots=True)
class Spec:
    """What an instance must have; tasks of equal specs can go to the same ones."""

    model: str
    vocabulary: bytes
    tokens: int = 0
    """Prompt and longest answer together."""
    wish: PlacementWish = ANYWHERE
    resumes: bool = False
    """It goes on with a paused job, whose KV is where the wish says."""

    def allows(self, candidate: Candidate) -> bool:
        """Whether ``candidate`` could ever take it, however busy it is now."""
        if candidate.model != self.model or candidate.vocabulary != self.vocabulary:
            return False
        if self.tokens > candidate.most_tokens:
            return False
        return self.wish.allows(candidate.name)


@dataclass(frozen=True, slots=True)
class Need:
    """One task's: its spec and its work. ``home`` is where its conversation was, or empty."""

    spec: Spec
    prompt_tokens: int = 1
    output_tokens: int = 1
    home: str = ""
