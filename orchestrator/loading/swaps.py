"""Swaps the models of instances, one swap at a time per instance, and follows each to its end."""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from orchestrator.clock import Clock
from orchestrator.errors import InvalidRequest, NotReady, SwapFailed, TidegateError
from orchestrator.instances.instance import Instance
from orchestrator.instances.registry import Registry
from orchestrator.lanes import ServerKind
from orchestrator.lanes.swap_call import OnReport
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.tasks.task import Task
from orchestrator.telemetry.log import fields, service_log
from orchestrator.telemetry.metrics import MetricRow
from protocol import ModelCard, Swap, SwapPhase, SwapReport

MAX_GRACE_S = 60.0
"""Maximum seconds for an instance's jobs to end before a swap if the caller sets no grace."""
MOVING_GRACE_S = 2.0
"""Grace in seconds if another instance can continue the jobs."""
READY_S = 30.0
"""Seconds from the worker's report that it serves a model until its card must be usable here."""
_POLL_S = 0.02
_KEPT = 8

AskForSwap = Callable[[str, Swap, OnReport], Awaitable[SwapReport]]
"""Asks a worker to swap: ``orchestrator.lanes.swap_call.ask_for_swap``, or a test's function."""


@dataclass(eq=False, slots=True)
class RunningSwap:
    """One swap. ``phase`` is the worker's, or ``queue`` while the old model's last tasks start."""

    address: str
    model: str
    """The requested name or path of the model, until the worker reports its name."""
    settings: Mapping[str, str]
    is_reload: bool
    began_at: float
    phase: str = "queue"
    ms: dict[str, float] = field(default_factory=dict)
    freed_mib: float = 0.0
    error: TidegateError | None = None
    total_ms: float = 0.0
    task: "asyncio.Task[None] | None" = None

    @property
    def is_over(self) -> bool:
        return self.phase in (SwapPhase.DONE.value, SwapPhase.FAILED.value)

    def take(self, report: SwapReport) -> None:
        """Record the worker's report. An end counts only after the new model's card has arrived."""
        self.ms |= report.ms
        self.model = report.model
        self.freed_mib = report.freed_mib
        if report.phase not in (SwapPhase.DONE, SwapPhase.FAILED):
            self.phase = report.phase.value

    async def wait(self) -> None:
        """Wait until the swap is over. Raises the error with which it failed."""
        assert self.task is not None
        await asyncio.shield(self.task)
        if self.error is not None:
            raise self.error


class Swaps:
    """Asks workers for swaps; ``latest`` has each instance's last one."""

    def __init__(
        self,
        registry: Registry,
        queue: TaskQueue[Task],
        ask: AskForSwap,
        clock: Clock,
        *,
        token: str = "",
    ) -> None:
        """``token``: the secret that workers require for a swap."""
        self.latest: dict[str, RunningSwap] = {}
        self.done: Counter[str] = Counter()
        self.load_ms: dict[str, deque[float]] = {}
        """Ms from request to usable card, without the drain, by model, for the latest loads."""
        self._registry = registry
        self._queue = queue
        self._ask = ask
        self._clock = clock
        self._token = token

    def reload(self, address: str, grace_s: float | None = None) -> RunningSwap:
        """Make an instance reload its model, or join a reload. Raises the errors of ``start``."""
        model = self._registry.named(address).model
        if not model:
            raise NotReady("the instance has not reported its model yet; ask again later")
        return self.start(address, {"model_name": model}, grace_s, is_reload=True)

    def start(
        self,
        address: str,
        settings: Mapping[str, str],
        grace_s: float | None = None,
        *,
        is_reload: bool = False,
    ) -> RunningSwap:
        """Begin a swap, or join a running one with the same settings (``Swap.settings``).
        ``grace_s``: seconds for running jobs; None: ``MAX_GRACE_S``, or ``MOVING_GRACE_S`` if
        another instance continues them. Raises ``NotFound``, ``InvalidRequest`` or ``NotReady``."""
        instance = self._registry.named(address)
        if instance.kind is not ServerKind.TIDEGATE:
            raise InvalidRequest(
                "this instance is another server's: only Tidegate's own workers load others",
                field="address",
            )
        running = self.latest.get(address)
        if running is not None and not running.is_over:
            if (running.settings, running.is_reload) == (settings, is_reload):
                return running
            doing = "reloading its model" if running.is_reload else f"swapping to {running.model}"
            raise NotReady(f"the instance is {doing}; ask again afterwards")
        model = settings.get("model_name") or settings["model_path"]
        swap = RunningSwap(address, model, dict(settings), is_reload, self._clock.now())
        self.latest[address] = swap
        swap.task = asyncio.create_task(self._run(swap, instance, grace_s), name=f"swap {address}")
        return swap

    def leaving(self) -> set[str]:
        """Instances that are about to replace their model."""
        return {address for address, swap in self.latest.items() if not swap.is_over}

    async def close(self) -> None:
        for swap in self.latest.values():
            if swap.task is not None:
                swap.task.cancel()

    def least_load_ms(self, model: str) -> float | None:
        """Ms of the shortest recent load of ``model``; None if there is none."""
        return min(self.load_ms.get(model, ()), default=None)

    def usual_load_ms(self, model: str) -> float | None:
        known = sorted(self.load_ms.get(model, ()))
        return known[len(known) // 2] if known else None

    async def _run(self, swap: RunningSwap, instance: Instance, grace_s: float | None) -> None:
        try:
            await self._follow(swap, instance, grace_s)
            end = SwapPhase.DONE
        except TidegateError as error:
            end, swap.error = SwapPhase.FAILED, error
        except Exception:
            service_log.exception("a swap could not be followed")
            end, swap.error = SwapPhase.FAILED, SwapFailed("an internal error occurred")
        swap.total_ms = 1000 * (self._clock.now() - swap.began_at)
        swap.phase = end.value
        self.done[end.value] += 1
        service_log.info(
            "swap over",
            extra=fields(
                instance=swap.address,
                model=swap.model,
                result=end.value,
                duration_ms=round(swap.total_ms, 1),
                reason=None if swap.error is None else swap.error.message,
            ),
        )
        self._registry.changed(topology=False)

    async def _follow(self, swap: RunningSwap, instance: Instance, grace_s: float | None) -> None:
        ends_at = self._clock.now() + (MAX_GRACE_S if grace_s is None else grace_s)
        before = instance.card
        waited_ms = await self._let_waiting_start(instance, ends_at)
        if waited_ms:
            swap.ms["queue"] = round(waited_ms, 1)
        if grace_s is not None:
            grace_s = max(0.0, ends_at - self._clock.now())
        else:
            # A drain ends with the last job, and each job ends by its deadline.
            grace_s = MOVING_GRACE_S if self._others(instance) else MAX_GRACE_S
        swap.phase = SwapPhase.CHECK.value
        message = Swap(
            dict(swap.settings), round(1000 * grace_s, 1), self._token, anew=swap.is_reload
        )
        report = await self._ask(swap.address, message, swap.take)
        await self._until_usable(instance, report, before)
        if report.ms:
            took = 1000 * (self._clock.now() - swap.began_at) - waited_ms
            took -= report.ms.get(SwapPhase.DRAIN.value, 0.0)
            self.load_ms.setdefault(report.model, deque(maxlen=_KEPT)).append(took)

    async def _let_waiting_start(self, instance: Instance, ends_at: float) -> float:
        """Let tasks that wait now start on their model's last instance; returns ms waited."""
        began_at = self._clock.now()
        if self._others(instance):
            return 0.0
        model = instance.model
        waiting = [task for task in self._queue.tasks() if model and task.model == model]
        while self._clock.now() < ends_at:
            if not any(task in self._queue for task in waiting):
                break
            await asyncio.sleep(_POLL_S)
        return 1000 * (self._clock.now() - began_at) if waiting else 0.0

    def _others(self, instance: Instance) -> bool:
        """Whether another instance with the same weights takes work and keeps its model."""
        card, leaving = instance.card, self.leaving()
        return card is not None and any(
            other is not instance
            and other.ready
            and other.address not in leaving
            and other.card is not None
            and other.card.model_digest == card.model_digest
            for other in self._registry
        )

    async def _until_usable(
        self, instance: Instance, report: SwapReport, before: ModelCard | None
    ) -> None:
        """Wait until the new model's tokenizer is ready. ``before`` is the old model's card. Raises
        ``SwapFailed``."""
        give_up_at = self._clock.now() + READY_S
        while not (
            instance.model == report.model
            and (not report.ms or instance.card is not before)  # none: it was there already
            and (instance.ready or instance.cordoned)
        ):
            if instance.fault:
                raise SwapFailed(f"the new model is loaded, but {instance.fault}")
            if instance.removed:
                raise SwapFailed("the instance was removed")
            if self._clock.now() >= give_up_at:
                raise SwapFailed(
                    f"the worker serves {report.model}, but was not ready here after"
                    f" {READY_S:.0f} s: {instance.reason or 'it drains'}"
                )
            await asyncio.sleep(_POLL_S)


SWAPS: tuple[MetricRow[Swaps], ...] = (
    MetricRow(
        "counter",
        "model_swaps",
        "swaps",
        "Swaps of an instance's model, by how they ended (WK-7)",
        lambda of: [((result,), of.done[result]) for result in ("done", "failed")],
        ("result",),
    ),
)
