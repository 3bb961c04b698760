"""Many orchestrators on virtual time: the simulator's own arithmetic."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.placement import Demand, Requirements, place
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.job import Priority
from perf.goodput.policies import FIXED_ROWS
from perf.load.workload import Sizes
from perf.sim.arrivals import SimArrival
from perf.sim.fleet.instance import FleetRequest, InstanceKind, SteppedInstance
from perf.sim.fleet.member import Expected, Hands, Post, Reports, SimMember
from perf.sim.fleet.report import FleetFigures, jain, max_min
from perf.sim.fleet.scene import FleetScene
from perf.sim.fleet.sharing import OURS, SHARINGS, Sharing
from perf.sim.fleet.world import VirtualFleet
from perf.sim.replay.worker import WorkerSpec
from perf.sim.simulate import Fleet, simulate
from worker.runner.synthetic import StepCost

COST = StepCost(6.4e-3, 0.635e-3, 0.44e-3)
KIND = InstanceKind(COST, slots=8)
PROMPTS, ANSWERS = Sizes(48, 0.8, 8, 256), Sizes(24, 0.7, 4, 96)
KINDS = (KIND, replace(KIND, slots=4))
SCENE = FleetScene("", 12, 6, 1.3, warm_s=1.0, seconds=2.0, cool_s=0.5, bound=8, kinds=KINDS)


@dataclass(frozen=True)
class Made:
    """Requests that are drawn; ``per_s`` of them a second for one instance of ``KIND``. The
    balancer knows the first ``doors`` orchestrators."""

    per_s: float = 20.0
    doors: int = 6

    @property
    def expected(self) -> Expected:
        rng = random.Random(1)
        return Expected(tuple(sorted(float(ANSWERS.draw(rng)) for _ in range(16))))

    def requests(self, scene: FleetScene, seed: int) -> Iterator[FleetRequest]:
        rng = random.Random(seed)
        at_s, number = 0.0, 0
        per_s = scene.load * self.per_s * scene.instances
        while (at_s := at_s + rng.expovariate(per_s)) < scene.warm_s + scene.seconds:
            prompt, length = PROMPTS.draw(rng), ANSWERS.draw(rng)
            service_s = COST.prompt_token_s * prompt + KIND.step_s(8) * length
            due = at_s + 0.25 + rng.choice((1.5, 3.0, 6.0)) * service_s
            tenant, door = rng.choice("abc"), rng.randrange(min(self.doors, scene.members))
            yield FleetRequest(
                str(number), number, door, tenant, at_s, Deadline(due, 0), prompt, length
            )
            number += 1


def request(number: int, prompt: int, length: int, due: float = 100.0) -> FleetRequest:
    return FleetRequest(str(number), number, 0, "", 0.0, Deadline(due, 0), prompt, length)


def test_rows_share_steps_and_prompts_hold_all_of_them_up() -> None:
    """Two slots, 10 ms a step and 1 ms more for each row, 1 ms for a prompt's token."""
    instance = SteppedInstance(0, InstanceKind(StepCost(0.010, 0.001, 0.001), slots=2))
    first, second, third = request(1, 10, 11), request(2, 20, 2), request(3, 10, 1)
    instance.accept(first, 0.0)
    assert instance.next_end() == pytest.approx(0.010 + 11 * 0.011)
    instance.accept(second, 0.043)  # three steps later
    assert instance.next_end() == pytest.approx(0.043 + 0.020 + 2 * 0.012)
    instance.accept(third, 0.050)
    assert (instance.load, instance.rows, instance.found_full) == (3, 2, 1)
    assert instance.take_finished(0.087) == [second]
    assert third.started == 0.087 and instance.rows == 2
    assert instance.next_end() == pytest.approx(0.087 + 0.010 + 0.012)
    instance.check_integrity()
    first.is_over = True
    instance.cancel(first, 0.098)
    assert first.made == 5
    assert instance.next_end() == pytest.approx(0.098 + 11 / 12 * 0.011, rel=1e-3)
    instance.check_integrity()


def small(name: str) -> Sharing:
    """A way to share, for a fleet as small as ``SCENE``."""
    sharing = SHARINGS[name]
    return replace(sharing, subset=6) if sharing.subset else sharing


@pytest.mark.parametrize("name", SHARINGS)
def test_every_request_has_one_end_and_nothing_is_left(name: str) -> None:
    sharing = small(name)
    world = VirtualFleet(SCENE, sharing, Made(), 1)
    run = world.run()
    asked = list(Made().requests(SCENE, 1))
    assert [one.number for one in run.requests] == [one.number for one in asked]
    ends = Counter((one.is_met, one.is_refused) for one in run.requests)
    assert all(one.is_over for one in run.requests) and ends[True, True] == 0
    assert min(ends[True, False], ends[False, True]) > 0.1 * len(asked)
    for one in run.requests:
        assert one.made == one.length if one.is_met else one.made < one.length
        assert one.started is not None or one.made == 0
    for instance in world.instances:
        instance.check_integrity()
        assert instance.load == 0
    for member in world.members:
        member.queue.check_integrity()
        assert not (member.queue or member.own)
    figures = FleetFigures.of(run)
    assert figures.found_full == 0 or not sharing.is_omniscient
    assert all((member.sees is not None) == bool(sharing.subset) for member in world.members)
    assert 0 < figures.met < 1 and 0.9 < figures.fair_tenants <= 1


def test_a_seed_says_everything() -> None:
    def figures(seed: int) -> FleetFigures:
        return FleetFigures.of(VirtualFleet(SCENE, SHARINGS["two"], Made(), seed).run())

    assert figures(1) == figures(1) != figures(2)


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.8, 1.3])
def test_one_instance_keeps_as_many_deadlines_as_on_the_real_scheduler(load: float) -> None:
    """The real orchestrator learns the lengths and pauses jobs, so that it is a little better."""
    scene = replace(SCENE, instances=1, members=1, load=load, warm_s=2.0, seconds=20.0, bound=100)
    scene = replace(scene, kinds=(KIND,))
    one = FleetFigures.of(VirtualFleet(scene, SHARINGS["shares"], Made(), 3).run())
    arrivals = [
        SimArrival(
            at_s=asked.arrived,
            prompt_tokens=asked.prompt_tokens,
            max_tokens=200,
            length=asked.length,
            deadline_ms=asked.deadline.left_ms(asked.arrived),
            tenant=asked.tenant,
            priority=Priority.INTERACTIVE,
        )
        for asked in Made().requests(scene, 3)
    ]
    spec = WorkerSpec(COST, 8, kv_tokens=64 * 1024)
    run = simulate(arrivals, Fleet(spec, 1), FIXED_ROWS, seed=3)
    results = [result for result in run.results if result.arrival.at_s >= scene.warm_s]
    real = sum(result.met for result in results) / len(results)
    print(f"load {load}: {one.met:.3f} here, {real:.3f} there")
    assert one.met == pytest.approx(real, abs=0.06)


def test_one_queue_for_all_evens_out_what_comes_to_one_door() -> None:
    scene = replace(SCENE, load=0.8)
    met = [
        FleetFigures.of(VirtualFleet(scene, small(name), Made(doors=1), 1).run()).met
        for name in (OURS, "shared-queue")
    ]
    assert met[1] > met[0] + 0.05


@pytest.mark.parametrize("name", ["free", "shares"])
@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(-2, 2)), min_size=1, max_size=24),
    st.integers(1, 400),
)
def test_the_choice_is_the_same_when_instances_that_look_alike_count_once(
    name: str, seen: list[tuple[int, int]], prompt: int
) -> None:
    kinds = [(KIND, InstanceKind(StepCost(4e-3, 1e-3, 1e-4), slots=8))[at % 2] for at in range(24)]
    reports = Reports(kinds[: len(seen)], Made().expected)
    hands = Hands(lambda *_: None, lambda _: None)
    post = Post(0, None, TaskQueue(-1), servers=1.0)
    member = SimMember(post, reports, SHARINGS[name], hands, random.Random(1))
    for number, (load, news) in enumerate(seen):
        reports.told(number, load)
        if news and load + news >= 0:
            member.news[number] = news
        member.own[number], member.shares[number] = load // 2, 1 + number % 4
    room = [number for number in range(len(seen)) if member.has_room_at(number)]
    able = member._able()
    assert set(able) <= set(room) and bool(able) == bool(room)
    if room:
        demand = Demand(Requirements("sim", b"sim"), prompt, reports.expected.usual)
        best = place(demand, [member._candidate(number) for number in room])
        assert best is not None
        assert member._choose(request(1, prompt, 1), able) == reports.numbers[best.name]


def test_fairness_of_equals_and_of_what_was_offered() -> None:
    assert jain([1.0, 1.0, 1.0]) == 1.0
    assert jain([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert max_min([100.0, 10.0, 10.0], 60.0) == [40.0, 10.0, 10.0]
    assert max_min([3.0, 3.0], 10.0) == [3.0, 3.0]
