"""The built-in placement: a pure function of a task's needs and a snapshot (OR-7)."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from orchestrator.instances.candidate import Candidate
from orchestrator.placement.requirements import Demand, Requirements
from orchestrator.prediction.step_model import LEAST_SPREAD
from orchestrator.tasks.job import PlacementMode

TTL_S = 600.0
"""Seconds after its last turn for which a conversation keeps its home instance (OR-9)."""
MAX_SESSIONS = 65_536
"""Maximum number of conversations with a home; an entry takes about 300 bytes, 20 MB in total."""


class Affinity:
    """Home instances, used to break ties: renewed by use, dropped after ``ttl_s`` or if too many.

    Times are seconds of the clock.
    """

    def __init__(self, ttl_s: float = TTL_S, max_sessions: int = MAX_SESSIONS) -> None:
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._homes: OrderedDict[tuple[str, str], tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def home(self, tenant: str, session: str, now: float) -> str:
        """The instance that had ``session`` last; empty if unknown."""
        if not session:
            return ""
        name, until = self._homes.get((tenant, session), ("", 0.0))
        return name if now < until else ""

    def record(self, tenant: str, session: str, name: str, now: float) -> None:
        if not session:
            return
        self._homes[tenant, session] = (name, now + self._ttl_s)
        self._homes.move_to_end((tenant, session))
        # All entries have the same lifetime, so the first one expires first.
        while len(self._homes) > self._max_sessions or next(iter(self._homes.values()))[1] <= now:
            self._homes.popitem(last=False)


NOTHING_CACHED: Mapping[str, int] = {}


def feasible(requirements: Requirements, candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates that could ever take such a task, even if they are busy or down now."""
    return [candidate for candidate in candidates if requirements.allows(candidate)]


def place(
    demand: Demand, able: Sequence[Candidate], cached: Mapping[str, int] = NOTHING_CACHED
) -> Candidate | None:
    """The candidate with room that finishes first; None if none has room.

    ``able``: ``feasible`` candidates. ``cached``: the number of the prompt's tokens that an
    instance holds, by name. Ties go to the conversation's last instance, then the lowest load by
    share of its limit, then the most free KV, then the smaller name: the choice is reproducible.
    """
    free = [c for c in able if c.has_room]
    constraint = demand.requirements.constraint
    if constraint.mode is PlacementMode.PREFER:
        free = [c for c in free if c.name in constraint.instances] or free
    if len(free) < 2:
        return free[0] if free else None
    prompt, output, held = demand.prompt_tokens, demand.output_tokens, cached.get
    # ``finish_ms`` inlined: there may be hundreds of candidates.
    known = [c.step.finish_ms(prompt - held(c.name, 0), output) for c in free if c.step is not None]
    # Finishes that differ by no more than the model errs are equal.
    limit = (1 + LEAST_SPREAD) * min(known, default=0.0)
    # A candidate of unknown speed counts as the best: otherwise its speed would never be measured.
    finishes = iter(known)
    ties = [c for c in free if c.step is None or next(finishes) <= limit]
    return min(
        ties, key=lambda c: (c.name != demand.home, c.load / c.limit, c.load, -c.kv_free, c.name)
    )


def finish_ms(
    demand: Demand, candidate: Candidate, cached: Mapping[str, int] = NOTHING_CACHED
) -> float:
    """Milliseconds until ``candidate`` would usually finish; 0 while its speed is unknown."""
    if candidate.step is None:
        return 0.0
    new = demand.prompt_tokens - cached.get(candidate.name, 0)
    return candidate.step.finish_ms(new, demand.output_tokens)
