"""DL-16: the deadline that a refusal names is taken, and not much later than the clip is done."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from clips.dispatch import admission
from clips.dispatch.admission import ClipAdmission
from clips.dispatch.fleet import ClipHealth, ClipInstance
from clips.dispatch.forecast import Ability, Begun, forecast
from clips.dispatch.task import ClipJob, ClipTask
from clips.dispatch.waiting import WaitingClips
from clips.plan.budgets import ClipStage
from clips.plan.plan import NOMINAL
from clips.plan.recipe import read_recipe
from orchestrator.errors import DeadlineInfeasible
from orchestrator.prediction.feasibility import AdmissionMode, FeasibilityConfig
from orchestrator.tasks.deadline import Deadline

NOW = 100.0
EPOCH_S = 1e9
TEXTS = ("Good morning.", "Good morning to everybody here who is still asleep.", "word " * 40)


class Scene:
    """Instances at different paces, whose buffers are taken, and clips that wait for them."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        clock: Any = SimpleNamespace(now=lambda: NOW, unix=lambda: NOW + EPOCH_S)
        self.instances = {f"{n}": self._instance(f"{n}") for n in range(rng.choice((1, 1, 2)))}
        fleet: Any = SimpleNamespace(
            instances=self.instances,
            ready=lambda: [*self.instances.values()],
            seen=lambda: [*self.instances.values()],
        )
        self.waiting = WaitingClips(fleet, clock)
        self.admission = ClipAdmission(
            fleet,
            self.waiting,
            clock,
            rng,
            FeasibilityConfig(AdmissionMode.ENFORCE, 0.0, refusal_cap=1.0, sample=0.0),
        )

    def _instance(self, address: str) -> ClipInstance:
        rng, units = self.rng, NOMINAL.units
        rates = {stage: rng.uniform(0.2, 8.0) / units[stage] for stage in ClipStage}
        instance = ClipInstance(address)
        instance.health, instance.heard_at = ClipHealth.UP, NOW
        instance.ability = Ability(rates, slots=rng.choice((1, 2)))
        for _ in range(instance.ability.slots):
            needs = self.clip(1000.0, rng.choice(TEXTS), degrade=False).needs
            done = {stage.value: 100 for stage in list(ClipStage)[: rng.randrange(3)]}
            begun = Begun(needs.whole(instance.ability), done)
            attempt: Any = SimpleNamespace(begun=begun)
            instance.attempts.append(attempt)
        return instance

    def clip(self, left_s: float, text: str, *, degrade: bool) -> ClipTask:
        recipe = read_recipe({"schema": "1.1", "text": text})
        deadline = Deadline(NOW + left_s, int(1000 * (NOW + left_s + EPOCH_S)))
        job = ClipJob(
            recipe=recipe,
            recipe_json=b"{}",
            deadline=deadline,
            correlation_id="",
            arrived=NOW,
            degrade=degrade,
        )
        return ClipTask("", job)

    def done_s(self, clip: ClipTask) -> float:
        """What it takes until there is the clip, and the time that is kept back."""
        others, place = [other.needs for other in self.waiting], self.waiting.place_of(clip)
        all_needs = [*others[:place], clip.needs, *others[place:]]
        found = forecast(all_needs, self.waiting.lines(NOW))[place]
        assert found is not None and found.is_in_time
        return found.done_at - NOW


@pytest.mark.parametrize("is_long", [False, True])
def test_dl16_the_deadline_that_is_named_is_taken_and_hardly_longer_than_it_takes(
    monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    """The clip waits behind more of the others by a later deadline: of those that came again by
    when they would have been done at once, every other one was refused again. Where the line
    ``is_long``, its end is as good."""
    if is_long:
        monkeypatch.setattr(admission, "_MAX_PLACES", 1)
    refused = 0
    for seed in range(60):
        scene = Scene(seed)
        rng = scene.rng
        for _ in range(rng.randrange(1, 12)):
            left_s = rng.choice((8, 15, 30, 60, 120, 300)) * rng.uniform(0.7, 1.3)
            text, degrade = rng.choice(TEXTS), rng.random() < 0.3
            clip = scene.clip(left_s, text, degrade=degrade)
            try:
                scene.admission.admit(clip)
            except DeadlineInfeasible as error:
                told_ms = error.details["earliest_feasible_deadline"]
                assert isinstance(told_ms, int)
                told_s = told_ms / 1000 - EPOCH_S - NOW
                again = scene.clip(told_s, text, degrade=degrade)
                scene.admission.admit(again)
                assert left_s < told_s
                assert is_long or told_s <= 1.5 * scene.done_s(again)
                refused += 1
            else:
                scene.waiting.add(clip)
    assert refused > 50


def test_dl16_who_finds_nobody_ready_is_told_what_it_takes_alone() -> None:
    scene = Scene(0)
    clip = scene.clip(1.0, TEXTS[0], degrade=False)
    scene.waiting.time(clip)
    scene.waiting.add(clip)
    scene.admission._fleet.ready = list  # type: ignore[method-assign, assignment]
    error = scene.admission.hopeless(clip, NOW + 10.0)
    assert isinstance(error, DeadlineInfeasible)
    told_ms = error.details["earliest_feasible_deadline"]
    assert told_ms == pytest.approx(
        1000 * (EPOCH_S + NOW) + error.details["predicted_finish_ms"], abs=2
    )
