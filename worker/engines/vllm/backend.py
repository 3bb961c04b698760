"""vLLM's engine core, stepped by our thread: a ``StepCore``.

It does not use ``AsyncLLM``, which runs the core in another process behind two sockets and an event
loop: there an abort is a message that is read between two steps, and a step's tokens are packed,
sent and unpacked before they can be read. Here an abort is a call between two steps, and we read
the core's own outputs.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from protocol import Code, FinishReason
from protocol.outcomes import RequestError
from worker.core import Job
from worker.engines.stepped import CoreLoad, Produced
from worker.engines.vllm.images import Pictures, VisionReader
from worker.engines.vllm.prefix_cache import BlockHasher, PrefixReports
from worker.engines.vllm.requests import EndMask, GrammarMasks, make_request, produced
from worker.errors import InvalidCall


class HeldRequests:
    """Requests of paused jobs, held back from vLLM's scheduler. On the engine's thread.

    It uses vLLM's own preemption: a request's blocks return to the pool, where the prefix cache
    still has them, and the request continues with its next token, including seeds and grammar.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._held: dict[str, Any] = {}

    def hold(self, name: str) -> bool:
        """Keep a request out of the batch. False while a step planned with it is not read yet: ask
        again after that."""
        scheduler, request = self._scheduler, self._held.get(name)
        if request is None:
            request = scheduler.requests[name]
            if request in scheduler.running:
                scheduler.running.remove(request)
                scheduler._preempt_request(request, time.monotonic())
                # As after a reset of the prefix cache: the runner of version 1 is to take the
                # request for one that it has not had in its last step.
                scheduler.prev_step_scheduled_req_ids.discard(name)
            elif request in scheduler.deferred_waiting or request not in [*scheduler.waiting]:
                return False
            scheduler.waiting.remove_requests([request])
            self._held[name] = request
        return not request.num_stale_output_tokens

    def release(self, name: str) -> None:
        """Resume a request. Does nothing for one that is not held."""
        request = self._held.pop(name, None)
        if request is not None:
            self._scheduler._enqueue_waiting_request(request)

    def forget(self, name: str) -> None:
        """Note that a request has ended."""
        self._held.pop(name, None)


class EngineCoreDead(RuntimeError):
    """One of vLLM's own processes has ended: nothing more can be computed."""


@dataclass(frozen=True, slots=True)
class CoreParts:
    """An ``EngineCore`` and the objects that were passed to it. ``reports`` is None without a
    prefix cache whose blocks we can name."""

    core: Any
    hasher: BlockHasher | None
    reports: PrefixReports | None
    block_tokens: int
    eos_token_ids: tuple[int, ...]
    ends: EndMask
    vocab_size: int
    can_continue: bool
    """Whether a request's draws and penalties do not depend on where it began."""
    can_pause: bool
    has_kv_connector: bool
    """Whether something else may keep the blocks of an aborted request."""
    has_failed: threading.Event
    """Set by vLLM when one of its processes ends."""
    prepare_thread: Callable[[], None]
    """Called on the thread that steps, before its first step."""
    adapters: Mapping[str, Any]
    """vLLM's ``LoRARequest`` of each adapter, by name."""
    images: VisionReader | None
    """Prepares prompts' images; None for a text-only model."""


@dataclass(frozen=True, slots=True)
class _Looking:
    """A job whose images a thread is preparing."""

    job: Job
    max_tokens: int
    seen: Future[Pictures]


class VllmCore:
    """A ``StepCore``. Aborted jobs are freed when ``abort`` returns, unless a KV connector
    keeps their blocks (``holds``)."""

    def __init__(self, parts: CoreParts) -> None:
        self._core = core = parts.core
        self._parts = parts
        self._jobs: dict[str, Job] = {}
        self._looking: dict[str, _Looking] = {}
        """Jobs whose images are being prepared; vLLM does not know them yet."""
        self._preparing = ThreadPoolExecutor(1, "tidegate-images")
        self._held = HeldRequests(core.scheduler)
        self._fences: dict[int, int] = {}
        """The latest step that may still write to an aborted job's blocks, by handle."""
        self._wake = threading.Event()
        self._closed = False
        self._is_prepared = False
        self._pool = core.scheduler.kv_cache_manager.block_pool
        self._hits = self._misses = self._prompt_tokens = 0
        core.structured_output_manager.backend = GrammarMasks(parts.vocab_size)
        if parts.reports is not None:
            core.scheduler.kv_event_publisher = parts.reports

    def add(self, handle: int, job: Job, max_tokens: int) -> None:
        reader = self._parts.images
        if not job.images:
            self._start(handle, job, max_tokens)
        elif reader is None:
            raise InvalidCall("this worker's model reads no images")
        else:
            seen = self._preparing.submit(reader.read, job)
            self._jobs[str(handle)] = job
            self._looking[str(handle)] = _Looking(job, max_tokens, seen)
            seen.add_done_callback(lambda done: self._wake.set())

    def _start(self, handle: int, job: Job, max_tokens: int, seen: Pictures | None = None) -> None:
        """Hand a job to vLLM. Raises ``InvalidCall``."""
        parts = self._parts
        request = make_request(
            handle,
            job,
            max_tokens,
            parts.eos_token_ids,
            parts.hasher,
            self._core.vllm_config,
            parts.ends,
            continues=parts.can_continue,
            adapter=parts.adapters[job.adapter] if job.adapter else None,
            seen=seen,
        )
        self._core.add_request(request)
        self._jobs[request.request_id] = job

    def abort(self, handles: Collection[int]) -> None:
        known = [name for name in map(str, handles) if name in self._jobs]
        for name in known:
            self._forget(name)
        if known:
            self._core.abort_requests(known)
        if self._core.scheduler.defer_block_free:
            step = self._core.scheduler.sched_step_seq
            self._fences.update((int(name), step) for name in known)

    def holds(self, handle: int) -> bool:
        scheduler = self._core.scheduler
        if str(handle) in scheduler.requests:
            return True
        if scheduler.processed_step_seq < self._fences.get(handle, 0):
            return True
        self._fences.pop(handle, None)
        return False

    def pause(self, handle: int) -> bool:
        return str(handle) not in self._looking and self._held.hold(str(handle))

    def resume(self, handle: int) -> None:
        self._held.release(str(handle))

    def step(self, wait_s: float) -> Sequence[Produced]:
        if self.has_failed:
            raise EngineCoreDead("a process of vLLM's has ended; its log says why")
        core = self._core
        if not self._is_prepared:
            self._is_prepared = True
            self._parts.prepare_thread()
        made = self._start_seen()
        if not core.scheduler.has_requests() and not core.batch_queue:
            if not made:
                self._wake.wait(wait_s)
                self._wake.clear()
            return made
        outputs, executed = core.step_fn()
        core.post_step(executed)
        if not outputs:
            if self._parts.has_kv_connector and not core.scheduler.has_unfinished_requests():
                self._wake.wait(wait_s)  # for what the connector has to finish
                self._wake.clear()
            return made
        for output in outputs[0].outputs:
            job = self._jobs.get(output.request_id)
            if job is not None:
                made.append(self._read(output, job))
        return made

    @property
    def has_failed(self) -> bool:
        return self._parts.has_failed.is_set()

    def interrupt(self) -> None:
        self._wake.set()

    def load(self) -> CoreLoad:
        pool, scheduler = self._pool, self._core.scheduler
        running, waiting = scheduler.get_request_counts()
        # One block is a placeholder.
        total, free = pool.num_gpu_blocks - 1, pool.get_num_free_blocks()
        cached = len(pool.cached_block_hash_to_block)
        return CoreLoad(
            kv_blocks_total=total,
            kv_blocks_used=total - free,
            running=running,
            waiting=waiting + len(self._looking),
            # A lower bound: of the blocks in use, those that are not full have no name.
            kv_blocks_cached=min(free, max(0, cached - (total - free))),
            hit_blocks_total=self._hits,
            missed_blocks_total=self._misses,
            prompt_tokens_total=self._prompt_tokens,
        )

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._jobs.clear()
            self._preparing.shutdown(wait=False, cancel_futures=True)
            self._core.shutdown()

    def _start_seen(self) -> list[Produced]:
        """Start jobs with ready images; returns the ends of those that have none."""
        failed = []
        for name in [name for name, one in self._looking.items() if one.seen.done()]:
            one = self._looking.pop(name)
            try:
                self._start(int(name), one.job, one.max_tokens, one.seen.result())
            except RequestError as error:
                code, message = error.code, str(error)
            except Exception as error:  # any error of a library or a model's own code
                code, message = Code.ENGINE_ERROR, f"its images could not be prepared: {error!r}"
            else:
                continue
            self._forget(name)
            end = FinishReason.ERROR
            failed.append(Produced(int(name), end=end, code=code, message=message))
        return failed

    def _read(self, output: Any, job: Job) -> Produced:
        made = produced(job, output)
        read = output.prefill_stats
        if read is not None:
            self._prompt_tokens += read.num_computed_tokens
            hits = read.num_cached_tokens // self._parts.block_tokens
            self._hits += hits
            self._misses += read.num_prompt_tokens // self._parts.block_tokens - hits
        if made.end is not None:
            self._forget(output.request_id)
        return made

    def _forget(self, name: str) -> None:
        del self._jobs[name]
        self._held.forget(name)
        if (looking := self._looking.pop(name, None)) is not None:
            looking.seen.cancel()
