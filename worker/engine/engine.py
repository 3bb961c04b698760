"""Our own engine: the loop over our scheduler, our runner and their KV tiers."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from secrets import randbits
from typing import Any

from protocol import KvReport, prefix_salt
from worker.core import Clock
from worker.engine.backend import Backend, Executed
from worker.engine.executor import Executor
from worker.engine.kv_events import KvEvents
from worker.engine.loop import EngineLoop
from worker.kv_disk.base import BlockTier
from worker.runner.base import Runner
from worker.runner.out_of_memory import StepMemory
from worker.scheduler.plan import Plan, Schedule
from worker.scheduler.request import Request
from worker.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """``hash_salt`` is the card's; ``overlap`` needs an ``OverlappingRunner``."""

    eos_token_ids: Collection[int] = ()
    hash_salt: bytes = b""
    overlap: bool = False


class Engine(EngineLoop):
    """An ``EngineService`` over a scheduler and a runner."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        config: EngineConfig,
        *,
        tier: BlockTier | None = None,
        memory: StepMemory | None = None,
        clock: Clock = time.monotonic,
        draw_seed: Callable[[], int] = lambda: randbits(64),
    ) -> None:
        self.scheduler = scheduler
        self.executor = Executor(
            scheduler, runner, memory or StepMemory(), clock, overlap=config.overlap
        )
        backend = OwnBackend(scheduler, self.executor, tier or BlockTier(), config.hash_salt)
        super().__init__(backend, config.eos_token_ids, clock=clock, draw_seed=draw_seed)


class OwnBackend(Backend):
    """Our scheduler and executor, with the disk tier, kept sessions and KV events."""

    can_pause = True

    def __init__(
        self, scheduler: Scheduler, executor: Executor, tier: BlockTier, hash_salt: bytes
    ) -> None:
        self.roster = self._scheduler = scheduler
        self.steps_in_flight = int(executor.launcher is not None)
        self._executor = executor
        self._tier = tier
        self._hash_salt = hash_salt
        self._kv_events = KvEvents()

    def prepare(self, request: Request) -> None:
        if request.prompt_tokens < self._scheduler.capacity_tokens:
            self._scheduler.prefix_cache.hash_prompt(
                request, prefix_salt(self._hash_salt, request.job.cache_salt)
            )

    def attach(self, wake: Callable[[], None]) -> None:
        self._tier.attach(wake)

    def kv_report(self) -> KvReport | None:
        return self._kv_events.take()

    @property
    def largest_step_tokens(self) -> int:
        return self._scheduler.config.max_step_tokens

    def pause(self, request: Request) -> bool:
        if request in self._executor.in_flight:
            return False
        self._scheduler.pause(request)
        return True

    def resume(self, request: Request) -> bool:
        return self._scheduler.resume(request)

    def release(self, request: Request, now: float) -> bool:
        if request in self._executor.in_flight:
            request.leaving = True
            return False
        if request.blocks and not request.spoilt:
            self._tier.keep(request)
        self._scheduler.sessions.end(request, now)
        if request.step_failed:
            self._scheduler.pool.spoil(request.blocks[request.full_blocks :])
        self._scheduler.release(request)
        return True

    def spoil(self, request: Request) -> None:
        self._scheduler.spoil(request)
        self._tier.forget(request.hashes[: request.full_blocks])

    def begin(self, now: float) -> None:
        self._tier.collect(now)
        self._scheduler.sessions.expire(now)

    def next_prompt_tokens(self, now: float, *, is_more_coming: bool) -> int:
        return self._scheduler.next_prompt_tokens(now, is_more_coming=is_more_coming)

    def schedule(self, now: float) -> Schedule:
        self._tier.restore(self._scheduler.waiting, now)
        return self._scheduler.schedule(now)

    def compute(self, plan: Plan | None, patience_s: Callable[[], float]) -> Executed | None:
        return self._executor.run(plan)

    def end(self) -> None:
        self._tier.spill()
        if (report := self._scheduler.pool.take_changes()) is not None:
            self._kv_events.add(report)

    def check_integrity(self) -> None:
        self._scheduler.check_integrity()

    @property
    def next_expiry(self) -> float:
        return self._scheduler.sessions.next_expiry

    def halt(self) -> None:
        self._executor.discard()

    def close(self) -> None:
        self._tier.close()
        self._executor.runner.close()

    def counts(self) -> dict[str, Any]:
        scheduler, disk = self._scheduler, self._tier.stats()
        pool, prefix_cache = scheduler.pool, scheduler.prefix_cache
        return {
            "kv_blocks_total": pool.total,
            "kv_blocks_used": pool.used_count,
            "kv_blocks_free": pool.free_count,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "cached_tokens_total": prefix_cache.cached_tokens_total,
            "kv_blocks_cached": pool.cached_count,
            "hit_blocks_total": prefix_cache.hit_blocks_total,
            "missed_blocks_total": prefix_cache.missed_blocks_total,
            "disk_saved_blocks_total": disk.saved_blocks,
            "disk_loaded_blocks_total": disk.loaded_blocks,
            "disk_save_ms_total": disk.save_ms,
            "disk_load_ms_total": disk.load_ms,
            "disk_failures_total": disk.failures,
            "stream_utilization": self._executor.stream_utilization,
            "paused": len(scheduler.paused),
            "sessions": len(scheduler.sessions),
            "session_blocks": pool.kept_count,
        }
