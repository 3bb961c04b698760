"""Bytes of media copied and newly allocated per clip between stages: every operation of torch is
looked at, and counted where it copies or allocates.

What providers and the encoder do within themselves is not counted, nor what Triton copies of the
MP4.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from clips.plan.plan import SAMPLE_RATE
from clips.plan.recipe import read_recipe
from clips.render.buffers import BufferPool, BufferSizes
from clips.render.memory import CountedMemory, clip_guard
from clips.render.pipeline import ClipPipeline, PipelineConfig, nominal_times
from clips.render.stages.base import Stages
from clips.render.stages.providers import Providers, load_providers
from perf.clips.throughput import SPEC, recipe_of

T = TypeVar("T")
_DEADLINE_S = 600.0
_CPU = torch.device("cpu")
_COPIES = {"clone", "copy_", "_to_copy", "cat", "stack", "index", "index_select", "constant_pad_nd"}
_ALLOCATES = {
    "empty",
    "zeros",
    "ones",
    "full",
    "empty_like",
    "zeros_like",
    "new_empty",
    "new_zeros",
}


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that adds up the bytes of what torch copies and allocates on this thread."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if isinstance(out, torch.Tensor):
            if name in _COPIES:
                self._counts["copied"] += out.nbytes
            elif name in _ALLOCATES:
                self._counts["allocated"] += out.nbytes
        return out


class _Apart:
    """A provider whose own operations are not counted, on whichever thread it is."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._provider, name)
        if name not in ("render", "score"):
            return found

        def apart(*args: Any) -> Any:
            return _elsewhere(lambda: found(*args))

        return apart


def _elsewhere(call: Callable[[], T]) -> T:
    """Run ``call`` on a thread without the counter, which is the calling thread's own."""
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with torch.inference_mode():
                results.append(call())
        except BaseException as error:  # handed on
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _stages() -> Stages:
    own = load_providers(
        _CPU, speech=["espeak"], portrait=["procedural"], video=["warp"], check=["tiny"]
    )
    return Stages(*(_Apart(each) for each in own.all()))


async def copied_between_stages() -> Counter[str]:
    """Bytes that the pipeline copies and allocates for a clip."""
    recipe, stages = read_recipe(recipe_of()), _stages()
    counts: Counter[str] = Counter()
    sizes = BufferSizes(SPEC.size, int(30 * SPEC.seconds) + 1, round(SPEC.seconds * SAMPLE_RATE))
    pool = BufferPool(sizes, 1, _CPU)
    config = PipelineConfig(SPEC.size, SPEC.seconds, buffer_s=0.0)
    guard = clip_guard(CountedMemory(lambda: 0))
    pipeline = ClipPipeline(Providers.single(stages), nominal_times(), guard, _CPU, config)
    lease = pool.lease()
    assert lease is not None
    try:
        plan = pipeline.plan(recipe, _DEADLINE_S, degrade=False)
        deadline_at = time.monotonic() + _DEADLINE_S
        with Counting(counts):
            await pipeline.run(
                recipe, plan, lease, deadline_at, lambda stage, done: None, degrade=False
            )
        return counts
    finally:
        lease.close()
        await asyncio.to_thread(pipeline.close)
