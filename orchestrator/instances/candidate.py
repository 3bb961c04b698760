"""A snapshot of an instance for placement."""

from dataclasses import dataclass

from orchestrator.instances.provenance import UNKNOWN, Provenance
from orchestrator.prediction.step_model import StepUnderLoad
from protocol import Adapter, Feature

UNLIMITED = 2**62


def read_capability(text: str) -> tuple[int, int]:
    """Parse ``9.0`` to (9, 0), which can be compared; (0, 0) for a text that is not a version."""
    major, _, minor = text.partition(".")
    is_version = major.isascii() and major.isdigit() and minor.isascii() and minor.isdigit()
    return (int(major), int(minor)) if is_version else (0, 0)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A snapshot of an instance. ``vocabulary`` identifies the tokenizer: token ids are valid only
    for instances with the same one. ``limit`` is the maximum number of jobs in flight there,
    ``load`` the present number. ``max_tokens`` limits a prompt plus its answer, by context and KV
    memory. ``kv_free`` is in blocks. Without a ``step`` its speed is unknown."""

    name: str
    model: str
    vocabulary: bytes
    ready: bool
    limit: int
    load: int
    max_tokens: int = UNLIMITED
    kv_free: int = 0
    step: StepUnderLoad | None = None
    device: str = ""
    slots: int = 0
    """Number of jobs that run at once, by rows and KV memory; more wait in the worker."""
    max_running: int = 0
    """Number of running jobs up to which a paused job with its KV there may resume."""
    most_rows: int = UNLIMITED
    """Number of jobs that should run at once."""
    batch: int = 0
    """Number of running batch jobs; they block no other work."""
    is_clearing: bool = False
    """Whether jobs are leaving their slots for others that have not started."""
    model_digest: str = ""
    """Digest of its weights: a text continues only with the same weights."""
    can_continue: bool = False
    """Whether it can continue any text of another instance."""
    lacks: frozenset[Feature] = frozenset()
    """Features that its engine lacks."""
    adapters: frozenset[Adapter] = frozenset()
    """LoRA adapters that it serves."""
    abort_ms: float = 0.0
    """Ms for which an aborted job may hold its slot there."""
    quantization: str = ""
    vram_bytes: int = 0
    compute_capability: tuple[int, int] = (0, 0)
    device_mask: int = 0
    provenance: Provenance = UNKNOWN
    """The entries of this machine's catalogs for its model and engine."""
    is_up: bool = True
    """Whether its jobs continue, even if it takes no new ones."""

    @property
    def free(self) -> int:
        return self.limit - self.load

    @property
    def has_room(self) -> bool:
        return self.ready and self.load < self.limit

    @property
    def has_free_slot(self) -> bool:
        return self.ready and self.load < (self.slots or self.limit)

    def stops_within(self, left_ms: float) -> bool:
        """Whether an aborted job frees its slot within ``left_ms``."""
        return not self.abort_ms or self.abort_ms < left_ms

    @property
    def can_resume(self) -> bool:
        """Whether a paused job with its KV here would resume at once."""
        # A paused job resumes before jobs that wait in the worker, so it may be sent whenever they
        # may, except right after its pause: it would take back the slot that it just left.
        most = self.max_running if self.is_clearing else max(self.max_running, self.limit)
        return self.is_up and self.load < min(most, self.most_rows + self.batch)

    def takes(self, *, yields: bool, resumes: bool) -> bool:
        """Whether a job may start or resume there now. A job that ``yields`` must not wait in the
        worker's queue, and must not run beyond the best number of rows."""
        if yields and self.load >= self.most_rows:
            return False
        if resumes:
            return self.can_resume
        return self.has_free_slot if yields else self.has_room
