"""Which provider serves a stage: the first that is loaded, or the one that a recipe names."""

import time

import pytest

from clips.plan.budgets import ClipStage
from clips.plan.recipe import RecipeError, read_recipe
from clips.render.buffers import BufferPool
from clips.render.prediction import LIKELY
from clips.render.settings import RenderSettings
from clips.render.stages.providers import load_providers
from tests.clips.render.fakes import CPU, SIZES, FakePortrait, Rig
from worker.errors import LoadError

RECIPE = {"schema": "1.1", "text": "Hi", "video": {"fps": 12}}


async def test_a_recipe_chooses_among_what_is_loaded() -> None:
    other = FakePortrait("other")
    rig = Rig(portraits=[other])
    pipeline = rig.pipeline
    assert pipeline.providers.names[ClipStage.PORTRAIT] == ("image", "other")
    recipe = read_recipe({**RECIPE, "providers": {"portrait": "other"}})
    with BufferPool(SIZES, 1, CPU).lease() or pytest.fail() as lease:
        plan = pipeline.plan(recipe, 600, degrade=False)
        until = time.monotonic() + 600
        await pipeline.run(recipe, plan, lease, until, lambda *said: None, degrade=False)
    assert (other.runs, rig.fakes[ClipStage.PORTRAIT].runs) == (1, 0)
    # What the other takes is learnt apart.
    for _ in range(8):
        pipeline.times[ClipStage.PORTRAIT]["other"].observe(500.0, 0.004)
    assert (
        pipeline.takes_s(recipe, plan, LIKELY)
        > 500
        > pipeline.takes_s(read_recipe(RECIPE), plan, LIKELY)
    )
    pipeline.close()
    assert other.closed and all(fake.closed for fake in rig.fakes.values())


async def test_a_provider_that_is_not_loaded_is_named() -> None:
    rig = Rig()
    recipe = read_recipe({**RECIPE, "providers": {"video": "liveportrait"}})
    with pytest.raises(RecipeError, match=r"providers\.video: 'liveportrait' is not loaded here"):
        rig.pipeline.plan(recipe, 600, degrade=False)
    rig.pipeline.close()


def test_unknown_and_missing_names_are_load_errors() -> None:
    def load(*portraits: str) -> None:
        load_providers(CPU, RenderSettings(portrait=portraits))

    with pytest.raises(
        LoadError, match="TIDEGATE_SLOT__PORTRAIT: no provider 'x'; available: proc"
    ):
        load("procedural", "x")
    with pytest.raises(LoadError, match="TIDEGATE_SLOT__PORTRAIT names no provider"):
        load()
