"""One of many instances, without its engine: slots, and steps that take longer the more rows run.

Between two moments at which a request begins or ends there the number of rows stays the same, so
all rows advance alike, and the next end is known beforehand: no step is played by itself::

    rows      2          3                        2
    ──────────┼──────────┼────────────────────────┼───▶ time
         a request    its prompt is computed,    the next end: as many steps
         begins       which holds all rows up    from here as its answer has left

Left out: noise, step boundaries (an end comes within its step, not at the end of it), prompts in
pieces beside decodes (the same time in all), KV memory, the prefix cache and pauses.
"""

import math
from dataclasses import dataclass, field
from heapq import heappop, heappush

from orchestrator.prediction import Load, StepModel, StepUnderLoad
from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.job import Priority
from worker.runner.synthetic import StepCost

STEP_TOKENS = 512
MIN_START_S = 0.1
"""Least seconds left with which a worker begins a request, as its settings have it."""
_EPSILON = 1e-6


@dataclass(eq=False, slots=True)
class FleetRequest:
    """One request, as the orchestrator that has it queues it (``queue.task_queue.Queueable``).

    Times are seconds; ``length`` is for the instance alone.
    """

    id: str
    number: int
    door: int
    """Number of the orchestrator that the balancer sends it to."""
    tenant: str
    arrived: float
    deadline: Deadline
    prompt_tokens: int
    length: int
    rank: float = 0.0
    is_background: bool = False
    work_ms: float = 0.0
    drop_at: float = 0.0
    priority: Priority = Priority.INTERACTIVE
    paused_on: str = ""
    holds_place: bool = False
    member: int = -1
    """Number of the queue that it is in."""
    instance: int = -1
    """Number of the instance that it was sent to; -1 while it waits in a queue."""
    is_there: bool = False
    """Whether it has come to its instance."""
    started: float | None = None
    """When it got a slot; None if it never did."""
    first_step: float = 0.0
    """Steps of its instance after which its first token is there."""
    made: int = 0
    is_over: bool = False
    is_met: bool = False
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class InstanceKind:
    """Speed and slots of an instance."""

    cost: StepCost
    slots: int

    def step_s(self, rows: int) -> float:
        return self.cost.step_s + self.cost.row_s * rows

    @property
    def pace(self) -> StepModel:
        """The model of its steps that an orchestrator has learnt: exact, for it is told."""
        cost = self.cost
        return StepModel(
            self.slots, STEP_TOKENS, 1e3 * cost.step_s, 1e3 * cost.row_s, 1e3 * cost.prompt_token_s
        )

    def under(self, jobs: int, mean_tokens: float) -> StepUnderLoad:
        """The instance's pace with ``jobs`` there, answers of ``mean_tokens`` each (compare
        ``ConcurrencyLimit.outstanding_work``)."""
        running = min(jobs, self.slots)
        waiting = jobs - running
        decode = round(mean_tokens * (running / 2 + waiting))
        return self.pace.under(Load(running, waiting, 0, decode))

    def per_s(self, prompt_tokens: float, answer_tokens: float) -> float:
        """Requests of that size per second with every slot taken."""
        steps = math.ceil(prompt_tokens / STEP_TOKENS) + answer_tokens - 1
        own_s = self.cost.prompt_token_s * prompt_tokens
        return 1 / (own_s + steps * self.step_s(self.slots) / self.slots)


@dataclass(eq=False, slots=True)
class SteppedInstance:
    """An instance at work. ``load`` counts what runs there and what waits for a slot."""

    number: int
    kind: InstanceKind
    load: int = 0
    rows: int = 0
    found_full: int = 0
    """How many requests were sent to it while no slot was free."""
    version: int = 0
    """Moves whenever ``next_end`` may have."""
    _steps: float = 0.0
    _at: float = 0.0
    _stall_s: float = 0.0
    _running: list[tuple[float, int, FleetRequest]] = field(default_factory=list)
    _waiting: list[tuple[float, int, FleetRequest]] = field(default_factory=list)

    def accept(self, request: FleetRequest, now: float) -> None:
        """Take a request: it gets a slot, or waits for one."""
        self._advance(now)
        self.version += 1
        self.load += 1
        request.is_there = True
        if self.rows < self.kind.slots:
            self._begin(request, now)
        else:
            self.found_full += 1
            heappush(self._waiting, (request.deadline.at, request.number, request))

    def next_end(self) -> float:
        """When the next answer is done, if nothing else happens; infinite if none runs."""
        while self._running and self._running[0][2].is_over:
            heappop(self._running)
        if not self._running:
            return math.inf
        left = max(0.0, self._running[0][0] - self._steps)
        return self._at + self._stall_s + left * self.kind.step_s(self.rows)

    def take_finished(self, now: float) -> list[FleetRequest]:
        """Requests whose answers are done by ``now``; their slots are free."""
        self._advance(now)
        self.version += 1
        finished = []
        while self._running and self._running[0][0] <= self._steps + _EPSILON:
            request = heappop(self._running)[2]
            if not request.is_over:
                request.made = request.length
                finished.append(request)
        self.rows -= len(finished)
        self.load -= len(finished)
        self._fill(now)
        return finished

    def cancel(self, request: FleetRequest, now: float) -> None:
        """Stop a request that is over, wherever it stands here."""
        self._advance(now)
        self.version += 1
        self.load -= 1
        if request.started is not None:
            self.rows -= 1
            made = math.floor(self._steps - request.first_step) + 1
            request.made = min(max(0, made), request.length)
            self._fill(now)

    def _advance(self, now: float) -> None:
        passed_s, self._at = now - self._at, now
        if not self.rows:
            self._stall_s = 0.0
            return
        stalled_s = min(passed_s, self._stall_s)
        self._stall_s -= stalled_s
        self._steps += (passed_s - stalled_s) / self.kind.step_s(self.rows)

    def _begin(self, request: FleetRequest, now: float) -> None:
        request.started = now
        self.rows += 1
        self._stall_s += self.kind.cost.prompt_token_s * request.prompt_tokens
        request.first_step = self._steps + math.ceil(request.prompt_tokens / STEP_TOKENS)
        end = request.first_step + request.length - 1
        heappush(self._running, (end, request.number, request))

    def _fill(self, now: float) -> None:
        """Give free slots to what waits, the most urgent first."""
        while self._waiting and self.rows < self.kind.slots:
            request = heappop(self._waiting)[2]
            if not request.is_over and request.deadline.at - now > MIN_START_S:
                self._begin(request, now)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless the counts are those of the requests."""
        running = sum(not request.is_over for *_, request in self._running)
        assert self.rows == running <= self.kind.slots
        assert self.load >= running
