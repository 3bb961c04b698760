"""Places tasks on the registry's current instances: feasible sets, prefixes, policy, affinity."""

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.clock import Clock
from orchestrator.instances.candidate import UNLIMITED, Candidate
from orchestrator.instances.registry import Registry
from orchestrator.placement.choose import Affinity, feasible, finish_ms, place
from orchestrator.placement.policy import Fact, Policy
from orchestrator.placement.requirements import Demand, Requirements, requirements_of
from orchestrator.tasks.job import PlacementConstraint, PlacementMode, Priority
from orchestrator.tasks.task import Task
from orchestrator.telemetry.log import service_log
from orchestrator.telemetry.metrics import MetricRow
from orchestrator.telemetry.narration import PLACED, PLACED_BY_PREFIX, PLACED_BY_SESSION, narrate
from protocol import HEARTBEAT_S, Feature


@dataclass(frozen=True, slots=True)
class Choice:
    """The instance for a task. It already holds ``cached_tokens`` of the task's prompt."""

    name: str
    cached_tokens: int


class Placer:
    """Chooses an instance for each task. Call ``refresh``, then ``choose`` for each task, and
    ``placed`` after each task that was sent.

    The feasible set of equal requirements is cached briefly while the snapshot's version is the
    same. Choices are never cached: all tasks would go to the same instance.
    """

    def __init__(
        self,
        registry: Registry,
        clock: Clock,
        output_tokens_of: Callable[[Task], int],
        policy: Policy | None = None,
    ) -> None:
        """``output_tokens_of`` returns the usual length of a task's answer, in tokens."""
        self.affinity = Affinity()
        self.policy = policy
        self.choices = 0
        self.prefix_choices = 0
        """Number of tasks placed on an instance that held a part of the prompt."""
        self.home_choices = 0
        """Number of tasks placed on the last instance of their conversation."""
        self._registry = registry
        self._clock = clock
        self._output_tokens_of = output_tokens_of
        self._candidates: dict[str, Candidate] = {}
        self._kept_until = 0.0
        self._token_limits: list[int] = []
        self._version = -1
        self._sets: dict[Requirements, list[str]] = {}
        """Names of the instances that could ever take a task, by its requirements."""

    def refresh(self) -> None:
        """Read the registry's instances again."""
        registry, now = self._registry, self._clock.now()
        if self._version != registry.snapshot_version or now >= self._kept_until:
            self._version, self._kept_until = registry.snapshot_version, now + HEARTBEAT_S
            self._sets.clear()
        self._candidates = {candidate.name: candidate for candidate in registry.candidates()}
        self._token_limits = sorted({c.max_tokens for c in self._candidates.values()})

    @property
    def has_room(self) -> bool:
        return any(c.has_room or c.can_resume for c in self._candidates.values())

    @property
    def has_free_slot(self) -> bool:
        """Whether any instance would run one more job at once, even with little gain."""
        return any(
            c.takes(yields=True, resumes=resumes)
            for c in self._candidates.values()
            for resumes in (False, True)
        )

    def could_start(self, task: Task) -> bool:
        self.refresh()
        return self.has_room_for(self.requirements(task))

    def is_possible(self, task: Task) -> bool:
        """Whether an instance that is up could ever take ``task``."""
        self.refresh()
        return any(c.ready for c in self._feasible(self.requirements(task)))

    def lacking(self, task: Task) -> frozenset[Feature]:
        """The features of ``task`` that the instance of its model with the fewest missing features
        lacks, ready or not; empty if one lacks none. As of the last ``refresh``."""
        if not task.features:
            return task.features
        lacks = [
            task.features & c.lacks
            for c in self._candidates.values()
            if c.model == task.model and c.vocabulary == task.vocabulary
        ]
        return min(lacks, key=lambda lack: (len(lack), sorted(lack)), default=frozenset())

    def may_return(self, task: Task) -> bool:
        """Whether an instance that is not ready could take ``task``, as of the last ``refresh``."""
        return any(not c.ready for c in self._feasible(self.requirements(task)))

    def is_excluded(self, task: Task) -> bool:
        """Whether the operator's policy excludes every instance for ``task``, even if idle.

        As of the last ``refresh``. Conditions on load, memory, cache or session may become true
        while the task waits; others do not.
        """
        if self.policy is None:
            return False
        able = self._feasible(self.requirements(task))
        facts = self._facts(task)
        demand = self._demand(task)
        everything = dict.fromkeys((c.name for c in able), max(0, task.prompt_tokens - 1))
        idle = [replace(c, load=0, kv_free=UNLIMITED) for c in able]
        for home, candidates, cached in (
            (demand.home, able, self._cached(task)),
            ("", idle, {}),
            *((c.name, [c], everything) for c in idle),
        ):
            at = replace(demand, home=home)
            if self._filter(self.policy, at, candidates, cached, facts):
                return False
        return True

    def has_room_for(self, requirements: Requirements) -> bool:
        """Whether an instance has room for such tasks, as of the last ``refresh``."""
        able = self._feasible(requirements)
        return any(c.can_resume if requirements.resumes else c.has_room for c in able)

    def requirements(self, task: Task) -> Requirements:
        """The requirements of ``task``. Token counts are rounded up to an instance's limit."""
        tokens = task.prompt_tokens + task.sampling.max_tokens
        at = bisect_left(self._token_limits, tokens)
        rounded = self._token_limits[at] if at < len(self._token_limits) else tokens
        if task.paused_on:
            keeper = PlacementConstraint(PlacementMode.PIN, (task.paused_on,))
            return Requirements(task.model, task.vocabulary, rounded, keeper, resumes=True)
        return requirements_of(task, rounded)

    def able(self, task: Task) -> list[str]:
        """Names of instances that are ready and could take ``task``, busy or not."""
        ready = [c.name for c in self._feasible(self.requirements(task)) if c.ready]
        return [name for name in ready if name not in task.failed_on] or ready

    def choose(self, task: Task) -> Choice | None:
        """The instance for ``task`` now; None if the task has to wait.

        Avoids instances where it failed before, if others are ready for it.
        """
        if task.paused_on:
            keeper = self._candidates.get(task.paused_on)
            return Choice(keeper.name, 0) if keeper and _takes(keeper, task) else None
        requirements = self.requirements(task)
        able: Sequence[Candidate] = [c for c in self._feasible(requirements) if c.ready]
        if task.failed_on:
            able = [c for c in able if c.name not in task.failed_on] or able
        left_ms = task.deadline.left_ms(self._clock.now())
        if task.is_background or task.priority is Priority.BATCH:
            able = [c for c in able if _takes(c, task)]
        else:  # ``_takes`` inlined: there may be hundreds
            able = [c for c in able if c.has_room]
        able = [c for c in able if c.stops_within(left_ms)]
        if not able:
            return None
        demand = self._demand(task)
        cached = self._cached(task)
        if self.policy is not None:
            able = self._filter(self.policy, demand, able, cached, self._facts(task))
        chosen = place(demand, able, cached)
        if chosen is None or not _takes(chosen, task):
            return None
        return Choice(chosen.name, cached.get(chosen.name, 0))

    def placed(self, task: Task, choice: Choice) -> None:
        now = self._clock.now()
        session, tenant = task.job.session_id, task.tenant
        self.choices += 1
        is_home = choice.name == self.affinity.home(tenant, session, now)
        self.prefix_choices += choice.cached_tokens > 0
        self.home_choices += is_home
        if service_log.isEnabledFor(logging.INFO):
            by_prefix = PLACED_BY_PREFIX if choice.cached_tokens else PLACED
            narrate(
                service_log,
                PLACED_BY_SESSION if is_home else by_prefix,
                choice.name,
                task_id=task.id,
                correlation_id=task.correlation_id,
                model=task.served_name,
                instance=choice.name,
                cached_tokens=choice.cached_tokens,
                model_entry=self._candidates[choice.name].provenance.model_entry or None,
                engine_entry=self._candidates[choice.name].provenance.engine_entry or None,
            )
        candidate = self._candidates[choice.name] = self._registry.candidate(choice.name)
        if Feature.KV_EVENTS not in candidate.lacks:  # otherwise its cached blocks are unknown
            self.affinity.record(tenant, session, choice.name, now)

    # ── inside ───────────────────────────────────────────────────────────────────────────────

    def _feasible(self, requirements: Requirements) -> Sequence[Candidate]:
        known, current = self._sets.get(requirements), self._candidates
        if known is None:
            found = feasible(requirements, current.values())
            known = self._sets[requirements] = [candidate.name for candidate in found]
        return [current[name] for name in known if name in current]

    def _cached(self, task: Task) -> Mapping[str, int]:
        """Number of prompt tokens that need no prefill, by instance."""
        blocks = self._registry.prefixes.longest(task.prefix_hashes)
        return {name: task.prompt_tokens_in(count) for name, count in blocks.items()}

    def _demand(self, task: Task) -> Demand:
        home = self.affinity.home(task.tenant, task.job.session_id, self._clock.now())
        return Demand(
            self.requirements(task), task.prompt_tokens, self._output_tokens_of(task), home
        )

    def _facts(self, task: Task) -> dict[str, Fact]:
        return {
            "model": task.served_name,
            "tenant": task.tenant,
            "priority": task.priority.value,
            "session": task.job.session_id,
            "prompt_tokens": task.prompt_tokens,
            "max_tokens": task.sampling.max_tokens,
            "left_ms": task.deadline.left_ms(self._clock.now()),
        }

    def _filter(
        self,
        policy: Policy,
        demand: Demand,
        able: Sequence[Candidate],
        cached: Mapping[str, int],
        facts: dict[str, Fact],
    ) -> Sequence[Candidate]:
        """The instances that the operator's policy ranks first; all if it fails (OR-8)."""
        scores = policy.scores(facts, [_facts(demand, c, cached) for c in able])
        if scores is None:
            return able
        best = min(scores, default=math.inf)
        return [c for c, score in zip(able, scores, strict=True) if score == best < math.inf]


def _takes(candidate: Candidate, task: Task) -> bool:
    yields = task.is_background or (
        task.priority is Priority.BATCH and candidate.most_rows < candidate.max_running
    )
    return candidate.takes(yields=yields, resumes=bool(task.paused_on))


def _facts(demand: Demand, candidate: Candidate, cached: Mapping[str, int]) -> dict[str, Fact]:
    step = candidate.step
    return {
        "name": candidate.name,
        "device": candidate.device,
        "load": candidate.load,
        "slots": candidate.limit,
        "free": candidate.free,
        "cached_tokens": cached.get(candidate.name, 0),
        "kv_free": candidate.kv_free,
        "has_session": candidate.name == demand.home,
        "predicted_finish_ms": finish_ms(demand, candidate, cached),
        "perf_tokens_per_s": 0.0 if step is None else step.tokens_per_s,
    }


PLACEMENT: tuple[MetricRow[Placer], ...] = (
    MetricRow("counter", "placements", "tasks", "Tasks placed", lambda placer: placer.choices),
    MetricRow(
        "counter",
        "placements_by_prefix",
        "tasks",
        "Tasks placed on an instance with a part of the prompt cached (OR-9)",
        lambda placer: placer.prefix_choices,
    ),
    MetricRow(
        "counter",
        "placements_by_session",
        "tasks",
        "Tasks placed on the last instance of their conversation (OR-9)",
        lambda placer: placer.home_choices,
    ),
)

POLICY: tuple[MetricRow[Policy], ...] = (
    MetricRow(
        "counter",
        "placement_policy_fallbacks",
        "choices",
        "Choices that the operator's policy could not make (OR-8); only if one is set",
        lambda policy: [((reason,), count) for reason, count in policy.fallbacks.items()],
        ("reason",),
    ),
)
