"""Clips on a machine whose pace changes: after a busy start, after idle times, in the middle of a
video (SL-1, SL-2, DL-15, DL-19). Time passes by the stages' own work alone.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from clips.plan.budgets import BUDGETS, FRESH_S, Activity, ClipStage, StageTimes
from clips.plan.plan import SAMPLE_RATE
from clips.plan.recipe import read_recipe
from clips.render.buffers import BufferSizes
from clips.render.build import warm_up
from clips.render.clip import Clip, ClipOrder, Unfinished
from clips.render.errors import OutOfTime
from clips.render.pipeline import LIKELY
from tests.clips.render.fakes import FakeVideo, Rig

SIZES = BufferSizes(size=128, frames=150, samples=5 * SAMPLE_RATE)
BUSY, CALM = 9.0, 0.3
"""Seconds that all of ``RECIPE``'s video takes."""
RECIPE = read_recipe({"schema": "1.0", "text": "Good morning to you", "video": {"fps": 24}})
WHOLE = 36 * 128**2
"""Pixels of its video."""


class Machine(Rig):
    """Videos take ``video_s`` for as much as ``RECIPE`` asks for; nothing else takes any time."""

    def __init__(self) -> None:
        activity = Activity(self.now)
        times = {stage: StageTimes(BUDGETS[stage], 1.0, activity) for stage in ClipStage}
        super().__init__(times, SIZES)
        self.now_s = 0.0
        self.video_s = CALM
        video = self.fakes[ClipStage.VIDEO]
        assert isinstance(video, FakeVideo)
        video.each = self._show

    def now(self) -> float:
        return self.now_s

    def _show(self, pixels: int) -> None:
        self.now_s += self.video_s * pixels / WHOLE

    async def clip(self, deadline_s: float, *, degrade: bool = False) -> Clip:
        """Raises ``OutOfTime`` and ``Unfinished``."""
        lease = self.pool.lease()
        assert lease is not None
        order = ClipOrder(RECIPE, self.now_s + deadline_s, degrade)
        with lease:
            return await self.pipeline.run(
                order, self.pipeline.plan(order), lease, lambda *said: None
            )

    def predicted_s(self) -> float:
        return self.pipeline.prediction.all_s(self.pipeline.whole(RECIPE), LIKELY)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine()
    for module in ("pipeline", "clip", "stage_runner", "build"):
        monkeypatch.setattr(f"clips.render.{module}.time", SimpleNamespace(monotonic=machine.now))
    yield machine
    machine.pipeline.close()


async def busy_start(machine: Machine) -> None:
    """Warm up at a fiftieth of the pace, and find the machine calm after that."""
    machine.video_s = BUSY
    await warm_up(machine.pipeline, machine.pool)
    machine.video_s = CALM
    assert machine.predicted_s() > 5


async def test_dl19_a_clip_is_tried_after_a_busy_start_and_teaches_its_pace(
    machine: Machine,
) -> None:
    await busy_start(machine)
    clip = await machine.clip(deadline_s=3.0)
    assert clip.frames == 36 and clip.total_ms < 500
    assert machine.predicted_s() == pytest.approx(CALM, rel=0.5)


async def test_sl2_a_video_behind_its_pace_is_begun_again_with_less(machine: Machine) -> None:
    machine.video_s = 6.0
    clip = await machine.clip(deadline_s=5.0, degrade=True)
    assert clip.plan.given_up == ("12 frames a second instead of 24",)
    assert clip.frames == 18 and clip.check is not None, "which nothing had to be given up for"
    assert machine.now_s < 4.0, "in time, with a second for what comes behind"
    assert clip.stage_ms[ClipStage.VIDEO] == pytest.approx(1000 * machine.now_s, rel=0.01)
    # The next one begins with what the first came to.
    machine.fakes[ClipStage.VIDEO].runs = 0
    clip = await machine.clip(deadline_s=5.0, degrade=True)
    assert clip.frames == 18 and machine.fakes[ClipStage.VIDEO].runs == 1


async def test_dl15_what_may_be_met_is_tried_and_what_is_certain_to_be_late_is_not(
    machine: Machine,
) -> None:
    for video_s in (2.0, 1.0, 1.0, 1.0):
        machine.video_s = video_s
        await machine.clip(deadline_s=10.0)
    assert machine.predicted_s() == pytest.approx(2.0, rel=0.5)
    assert (await machine.clip(deadline_s=2.1)).frames == 36
    with pytest.raises(OutOfTime):
        await machine.clip(deadline_s=1.5)


async def test_predictions_fall_with_the_second_clip_that_is_much_faster(machine: Machine) -> None:
    machine.video_s = BUSY
    for _ in range(10):
        await machine.clip(deadline_s=60.0)
    assert machine.predicted_s() > 8
    machine.video_s = CALM
    await machine.clip(deadline_s=60.0)
    assert machine.predicted_s() > 8, "one may be luck"
    await machine.clip(deadline_s=60.0)
    assert machine.predicted_s() < 1


async def test_sl1_timeouts_take_nothing_from_the_warm_up(machine: Machine) -> None:
    machine.video_s = BUSY
    await warm_up(machine.pipeline, machine.pool)
    for stage, times in machine.times.items():
        assert times.timeout_s(1.0) == BUDGETS[stage].timeout_s


async def test_sl1_less_is_rendered_where_a_stage_would_be_stopped_for_all_of_it(
    machine: Machine,
) -> None:
    """A video of ten seconds is stopped, though its deadline is an hour away."""
    machine.video_s = 14.0
    with pytest.raises(Unfinished, match=r"took longer than 10\.0 s"):
        await machine.clip(deadline_s=3600.0)
    for _ in range(2):  # whether the pace is known, or seen on the way
        clip = await machine.clip(deadline_s=3600.0, degrade=True)
        assert clip.plan.given_up == ("12 frames a second instead of 24",)
        machine.now_s += FRESH_S
