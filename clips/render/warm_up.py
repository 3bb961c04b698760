"""Renders clips before the first request, so that models are loaded and compiled by then, and
predictions rest on this machine instead of the stated targets."""

import time

from clips.plan.budgets import Stage
from clips.plan.recipe import Chosen, Portrait, Recipe, Video
from clips.render.buffers import BufferPool
from clips.render.clip import Unfinished
from clips.render.errors import ClipError
from clips.render.memory import media_log
from clips.render.pipeline import ClipPipeline
from worker.errors import RequestError

_TEXT = "Good morning."
_ENOUGH_S = 10.0
"""Seconds after which no more clips are begun: SL-1 allows a cold start 30 s."""
_DEADLINE_S = 60.0


async def warm_up(pipeline: ClipPipeline, pool: BufferPool) -> None:
    """Render a short clip by each loaded provider, twice where time allows, since the first of each
    includes one-time costs. Does not raise for a provider that fails: its requests will.
    """
    began = time.monotonic()
    for recipe in _recipes(pipeline):
        for _ in range(2):
            if time.monotonic() - began < _ENOUGH_S:
                await _render(pipeline, pool, recipe, time.monotonic() + _DEADLINE_S)
    pipeline.end_warm_up()
    media_log.info("warmed up in %.2f s", time.monotonic() - began)


def _recipes(pipeline: ClipPipeline) -> list[Recipe]:
    """Enough recipes for each provider to serve one."""
    names = pipeline.providers.names

    def chosen(at: int) -> Chosen:
        each = {stage: of_stage[min(at, len(of_stage) - 1)] for stage, of_stage in names.items()}
        return Chosen(
            each[Stage.SPEECH], each[Stage.PORTRAIT], each[Stage.VIDEO], each[Stage.CHECK]
        )

    return [
        Recipe(
            schema="1.1",
            text=_TEXT,
            portrait=Portrait(seed=1),
            video=Video(seconds=1.0),
            providers=chosen(at),
        )
        for at in range(max(map(len, names.values())))
    ]


async def _render(
    pipeline: ClipPipeline, pool: BufferPool, recipe: Recipe, deadline_at: float
) -> None:
    lease = pool.lease()
    assert lease is not None, "nothing else runs yet"
    try:
        plan = pipeline.whole(recipe)
        await pipeline.run(recipe, plan, lease, deadline_at, _unsaid, degrade=False)
    except (Unfinished, ClipError, RequestError) as error:
        media_log.warning("the warm-up did not finish: %s", error)
    finally:
        lease.close()


def _unsaid(stage: Stage, done: float) -> None:
    """Do nothing: nobody follows the progress."""
