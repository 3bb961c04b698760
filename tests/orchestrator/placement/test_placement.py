"""Placement is a pure function of needs and snapshot (OR-7); what it remembers is a hint (OR-9)."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.instances.candidate import Candidate
from orchestrator.instances.prefix_index import PrefixIndex
from orchestrator.placement.choose import Affinity, feasible, place
from orchestrator.placement.placer import Placer
from orchestrator.placement.policy import Policy
from orchestrator.placement.requirements import Demand, Requirements
from orchestrator.prediction.step_model import IDLE, LEAST_SPREAD, Load, StepModel
from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.job import PlacementConstraint, PlacementMode
from orchestrator.tasks.task import Task
from protocol import KvReport, Sampling
from tests.support.clock import ManualClock
from tests.support.jobs import make_job
from tests.support.paces import pace_of

FAST = pace_of(8, 512, 5.0, 0.5, 0.1)
SLOW = pace_of(8, 512, 50.0, 5.0, 1.0)
NAMES = "abcdef"

models = st.builds(
    pace_of,
    slots=st.integers(1, 16),
    step_tokens=st.integers(16, 512),
    base_ms=st.floats(0.1, 50),
    row_ms=st.floats(0.01, 5),
    prompt_token_ms=st.floats(0.001, 1),
    prompt_tokens_per_step=st.floats(0, 100),
)
loads = st.builds(
    Load,
    running=st.integers(0, 16),
    waiting=st.integers(0, 8),
    prefill_tokens=st.integers(0, 2000),
    decode_tokens=st.integers(0, 5000),
)
steps = st.builds(StepModel.under, models, loads)
constraints = st.builds(
    PlacementConstraint,
    st.sampled_from(PlacementMode),
    st.lists(st.sampled_from(NAMES), max_size=3).map(tuple),
)
candidates = st.lists(
    st.builds(
        Candidate,
        name=st.sampled_from(NAMES),
        model=st.sampled_from(["m", "m", "other"]),
        vocabulary=st.sampled_from([b"v", b"v", b"w"]),
        ready=st.booleans(),
        limit=st.integers(1, 8),
        load=st.integers(0, 10),
        max_tokens=st.sampled_from([100, 1000]),
        kv_free=st.integers(0, 10),
        step=st.one_of(st.none(), steps),
    ),
    max_size=6,
    unique_by=lambda c: c.name,
)
demands = st.builds(
    Demand,
    st.builds(Requirements, st.just("m"), st.just(b"v"), st.sampled_from([50, 500]), constraints),
    prompt_tokens=st.integers(1, 400),
    output_tokens=st.integers(1, 200),
    home=st.sampled_from(["", *NAMES]),
)
holdings = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 400))


def finish(demand: Demand, candidate: Candidate, cached: dict[str, int]) -> float:
    if candidate.step is None:
        return 0.0
    new = demand.prompt_tokens - min(demand.prompt_tokens - 1, cached.get(candidate.name, 0))
    return candidate.step.finish_ms(new, demand.output_tokens)


def fits(demand: Demand, candidate: Candidate) -> bool:
    requirements, constraint = demand.requirements, demand.requirements.constraint
    named = candidate.name in constraint.instances
    return (
        candidate.ready
        and candidate.load < candidate.limit
        and (candidate.model, candidate.vocabulary) == (requirements.model, requirements.vocabulary)
        and requirements.tokens <= candidate.max_tokens
        and (constraint.mode is not PlacementMode.PIN or named)
        and (constraint.mode is not PlacementMode.AVOID or not named)
    )


@given(demands, candidates, holdings)
def test_or7_the_choice_fits_finishes_first_and_does_not_depend_on_order(
    demand: Demand, given_candidates: list[Candidate], cached: dict[str, int]
) -> None:
    chosen = place(demand, feasible(demand.requirements, given_candidates), cached)
    able = [c for c in given_candidates if fits(demand, c)]
    if demand.requirements.constraint.mode is PlacementMode.PREFER:
        able = [c for c in able if c.name in demand.requirements.constraint.instances] or able
    assert (chosen is None) == (not able)
    assert place(demand, feasible(demand.requirements, given_candidates[::-1]), cached) == chosen
    if chosen is None:
        return
    assert chosen in able
    best = min((finish(demand, c, cached) for c in able if c.step), default=0.0)
    limit = (1 + LEAST_SPREAD) * best + 1e-6
    assert chosen.step is None or finish(demand, chosen, cached) <= limit
    ties = {c.name for c in able if c.step is None or finish(demand, c, cached) < limit - 1e-3}
    if demand.home in ties:
        assert chosen.name == demand.home


def candidate(name: str, **changes: object) -> Candidate:
    plain = Candidate(name, "m", b"v", True, 8, 0, step=FAST.under(IDLE))
    return replace(plain, **changes)  # type: ignore[arg-type]


SPEC = Requirements("m", b"v", 0)


def test_or7_an_instance_of_unknown_pace_gets_to_show_it() -> None:
    demand = Demand(SPEC, 10, 10)
    new, busy = candidate("new", step=None), candidate("a", load=1)
    assert place(demand, [busy, new]) is new
    assert place(demand, [candidate("a"), replace(new, load=1)]) == candidate("a")


def test_or9_goes_where_the_prefix_is_only_when_that_finishes_sooner() -> None:
    demand = Demand(SPEC, prompt_tokens=400, output_tokens=10)
    near, far = candidate("near"), candidate("far")
    assert place(demand, [near, far], {"near": 300}) is near
    late = candidate("near", step=FAST.under(Load(8, 4, 0, 2000)))
    assert place(demand, [late, far], {"near": 300}) is far


def test_or7_ties_go_to_the_conversation_then_load_then_memory_then_name() -> None:
    demand = Demand(SPEC, 10, 10, home="c")
    a, b, c = candidate("a"), candidate("b"), candidate("c", load=1)
    assert place(demand, [a, b, c]) is c
    demand = replace(demand, home="")
    assert place(demand, [b, c, a]) is a
    assert place(demand, [a, b, replace(c, load=0, kv_free=5)]) == replace(c, load=0, kv_free=5)
    assert place(demand, [candidate("slow", step=SLOW.under(IDLE)), c]) is c


@given(st.data())
def test_or9_the_longest_prefix_is_that_of_a_slow_search(data: st.DataObject) -> None:
    most = 6
    index, held = PrefixIndex(most), {name: dict.fromkeys(b"") for name in "abc"}
    blocks = [bytes([i]) for i in range(10)]
    names = st.lists(st.sampled_from(blocks), unique=True, max_size=8)
    for _ in range(data.draw(st.integers(1, 8))):
        instance = data.draw(st.sampled_from("abc"))
        report = KvReport(data.draw(names), data.draw(names), full=data.draw(st.booleans()))
        if data.draw(st.integers(0, 9)) == 0:
            index.remove(instance)
            held[instance] = {}
        else:
            index.apply(instance, report)
            own: dict[bytes, None] = {} if report.full else dict(held[instance])  # type: ignore[arg-type]
            for name in report.evicted:
                own.pop(name, None)
            for name in report.added:
                own[name] = None
            held[instance] = dict.fromkeys(list(own)[-most:])  # type: ignore[arg-type]
        index.check_integrity()
        wanted = data.draw(names)
        slow = {
            i: depth
            for i, own in held.items()
            if (depth := len(list(itertools.takewhile(own.__contains__, wanted))))
        }
        assert index.longest(wanted) == slow


def test_or9_affinity_is_soft_and_bounded() -> None:
    affinity = Affinity(ttl_s=10, max_sessions=2)
    affinity.record("t", "s", "a", now=0)
    assert affinity.home("t", "s", now=9.9) == "a"
    assert affinity.home("other", "s", now=1) == ""
    assert affinity.home("t", "s", now=10) == ""
    for name in "xyz":
        affinity.record("t", name, "b", now=1)
    assert len(affinity) == 2
    assert affinity.home("t", "z", now=2) == "b"
    affinity.record("t", "w", "b", now=50)
    assert len(affinity) == 1
    affinity.record("t", "", "b", now=50)
    assert affinity.home("t", "", now=50) == ""


class FakeRegistry:
    """A registry of fixed candidates."""

    def __init__(self, *given_candidates: Candidate) -> None:
        self.snapshot_version = 1
        self.prefixes = PrefixIndex()
        self.now = {c.name: c for c in given_candidates}

    def candidates(self) -> Sequence[Candidate]:
        return list(self.now.values())

    def candidate(self, name: str) -> Candidate:
        return self.now[name]


def task(**changes: object) -> Task:
    made = Task("t", make_job(**{"deadline": Deadline(200.0, 0), **changes}))
    made.model, made.vocabulary, made.prompt_tokens, made.block_tokens = "m", b"v", 64, 16
    return made


def placer(registry: FakeRegistry, policy: str = "", clock: ManualClock | None = None) -> Placer:
    clock = clock or ManualClock()  # a policy's time limit is not this machine's to break
    made = Placer(
        registry,
        clock,
        lambda task: task.sampling.max_tokens,
        Policy.compile(policy, now=clock.now) if policy else None,
    )
    made.refresh()
    return made


def test_or9_a_conversation_stays_and_a_prompt_goes_where_it_is_cached() -> None:
    registry = FakeRegistry(candidate("a"), candidate("b"))
    chooser = placer(registry)
    talk = task(session_id="s")
    first = chooser.choose(talk)
    assert first is not None and first.name == "a"
    registry.now["a"] = candidate("a", load=4)
    chooser.placed(talk, first)
    again = chooser.choose(talk)
    assert again is not None and again.name == "a"  # not the least loaded: its conversation is here
    other = chooser.choose(task())
    assert other is not None and other.name == "b"

    registry.prefixes.apply("a", KvReport([b"1", b"2", b"3", b"4"], [], full=True))
    prompt = task()
    prompt.prefix_hashes = [b"1", b"2", b"3", b"4"]
    near = chooser.choose(prompt)
    assert near is not None and (near.name, near.cached_tokens) == ("a", 63)


def test_or7_the_feasible_set_is_kept_for_a_version_and_a_moment_only() -> None:
    clock = ManualClock()
    registry = FakeRegistry(candidate("a"))
    chooser = placer(registry, clock=clock)
    assert chooser.could_start(task())
    registry.now = {"b": candidate("b")}
    assert not chooser.could_start(task())  # the old set, of which nothing is left
    registry.snapshot_version += 1
    assert chooser.could_start(task())
    registry.now = {"c": candidate("c")}
    clock.advance(1.1)
    assert chooser.could_start(task())


def test_or7_a_pinned_task_and_one_too_long_are_known_to_be_impossible() -> None:
    registry = FakeRegistry(candidate("a", max_tokens=80), candidate("b", ready=False))
    chooser = placer(registry)

    def constraint(mode: PlacementMode, *names: str) -> Task:
        return task(placement=PlacementConstraint(mode, names))

    assert chooser.is_possible(constraint(PlacementMode.PIN, "a"))
    assert not chooser.is_possible(constraint(PlacementMode.PIN, "b"))
    assert not chooser.is_possible(constraint(PlacementMode.AVOID, "a"))
    assert chooser.is_possible(constraint(PlacementMode.PREFER, "b"))
    long = task(sampling=Sampling(max_tokens=17))
    assert not chooser.is_possible(long)


def test_or8_the_operators_policy_filters_and_scores() -> None:
    registry = FakeRegistry(candidate("a", load=3), candidate("b", load=1), candidate("c"))
    assert placer(registry).choose(task()).name == "c"  # type: ignore[union-attr]
    assert placer(registry, 'instance.name != "c"').choose(task()).name == "b"  # type: ignore[union-attr]
    assert placer(registry, "-instance.load").choose(task()).name == "a"  # type: ignore[union-attr]
    assert placer(registry, "task.max_tokens > 10").choose(task()) is None
    broken = placer(registry, "1 / instance.load > 0")
    assert broken.choose(task()).name == "c"  # type: ignore[union-attr]
    assert broken.policy is not None and broken.policy.fallbacks["error"] == 1
