"""The present schedule of a model's instances, simulated forward (``forecast``).

Running requests come first, then waiting requests in the order of the queue. The simulation gives a
request's chance, the loss of others by it, and its start and end.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from orchestrator.clock import Clock
from orchestrator.prediction.engine_time import EngineTime
from orchestrator.prediction.forecast import Asked, Machine, Played, Table, at_share, play
from orchestrator.prediction.forecaster import FIRST_GUESS_MS, USUAL, Forecaster
from orchestrator.prediction.step_learner import USUAL_S
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.tasks.job import Priority
from orchestrator.tasks.task import Task
from protocol import OnDeadline, Outcome

MOST: Final = 256
"""Maximum number of simulated requests, the first in order: 400 took 4 ms of CPU. Requests behind
them are assumed to come right after."""
LOSS_WEIGHT: Final = 0.5
"""Weight of the chances that others lose: those chances are too optimistic, because later requests
lower them, and a worker delays a prompt before rows miss a token. In 9 cells of the simulator 0,
0.5 and 1 met 0.995, 1.030 and 1.029 of the number met without it; with 1, conversations with
deadlines for parts met 0.85 at twice the capacity, with 0.5 no cell met less than 0.99."""
ROW_DRAWS: Final = 4
"""Number of scenarios to compare numbers of rows. In the simulator sixteen met 1.00 of what these
met and took twice the CPU."""
FRESH_S: Final = 0.01
"""Seconds for which a line stays valid while it holds the same requests."""
KEPT: Final = 4 * len(Priority)
"""Number of cached lines per model: the present ones and those by deadline, each with and without
one request."""
ROWS_EVERY_S: Final = 0.1
"""Seconds between two decisions on the number of rows (``dispatch.rows``). One decision simulates
the schedule once while all requests are met, otherwise a dozen times with pauses
(``replan.PAUSE_S``), at 0.6 ms of CPU each with 164 requests. In the simulator 0.05 and 0.2 seconds
met 1.00 and 0.995 of that, and one number for each doubling instead of two 0.99."""
AMPLE: Final = 10.0
"""A request has ample time for an urgent one if its remaining time is this multiple of the other's:
the urgent one then ends long before it, and new requests, run short of time."""


class RunningJob(Protocol):
    """The part of a job on a worker that predictions read."""

    @property
    def task(self) -> Task: ...
    @property
    def is_paused(self) -> bool: ...


class Prospect(NamedTuple):
    """The forecast of one request. Times are equally likely, in ms from now, in rising order."""

    chance: float
    """Chance (0 to 1) that every stated part of it is in time."""
    gain: float
    """``chance`` minus the chances that others lose by it (``LOSS_WEIGHT``)."""
    start_ms: tuple[float, ...]
    first_ms: tuple[float, ...]
    """When its first token comes."""
    end_ms: tuple[float, ...]
    """When its answer is complete at its full length, regardless of its deadline."""
    most_rows: float = math.inf
    """Most rows per instance, until the request ends, for which this forecast holds."""


UNKNOWN: Final = Prospect(1.0, 1.0, (0.0,), (0.0,), (0.0,))
"""The prospect before enough steps were measured: missing data refuses no request."""
HOPELESS: Final = Prospect(0.0, -math.inf, (0.0,), (0.0,), (0.0,))
"""Worse than any other prospect."""


class _Presence:
    """The average number of requests, running or waiting."""

    def __init__(self) -> None:
        self.urgent = self.all = 0.0
        """Averages of interactive requests, and of all."""
        self._last = 0, 0
        self._at = -math.inf

    def see(self, urgent: int, everything: int, now: float) -> None:
        kept = math.exp((self._at - now) / USUAL_S)
        self.urgent = self._last[0] + (self.urgent - self._last[0]) * kept
        self.all = self._last[1] + (self.all - self._last[1]) * kept
        self._last, self._at = (urgent, everything), now


class _Line:
    """A model's running and waiting requests in order, and the result of simulating them."""

    def __init__(self, machine: Machine, tasks: list[Task], asked: list[Asked], at: float) -> None:
        self.machine = machine
        self.tasks = tasks
        self.asked = asked
        self.at = at
        """When the requests were read, in seconds of the clock."""
        self.prospects: dict[Hashable, Prospect] = {}
        """Prospects of one more request here, by its properties and its place."""

    @cached_property
    def played(self) -> Played:
        return play(self.asked, self.machine)

    @cached_property
    def chances(self) -> NDArray[np.float64]:
        return self.played.chances(self.asked)

    def with_one(self, place: int, task: Task, asked: Asked) -> "_Line":
        tasks = [*self.tasks[:place], task, *self.tasks[place:]]
        return _Line(
            self.machine, tasks, [*self.asked[:place], asked, *self.asked[place:]], self.at
        )

    def without(self, place: int) -> "_Line":
        tasks, asked = self.tasks.copy(), self.asked.copy()
        del tasks[place], asked[place]
        return _Line(self.machine, tasks, asked, self.at)


class Schedule:
    """Simulates the running and waiting requests of a model."""

    def __init__(
        self,
        queue: TaskQueue[Task],
        forecaster: Forecaster,
        running: Iterable[RunningJob],
        clock: Clock,
    ) -> None:
        """``running`` iterates over all jobs on workers at the moment of iteration."""
        self._queue = queue
        self._forecaster = forecaster
        self._running = running
        self._clock = clock
        self.may_free_row: Callable[[Task], bool] = lambda task: True
        """Whether a job could be paused for a task."""
        self.may_get_row: Callable[[Task], bool] = lambda task: True
        """Whether a task may get a row at once although all are taken."""
        self.adapts_rows: Callable[[str], bool] = lambda model: True
        """Whether all instances of a model run fewer rows if that meets more requests."""
        self._lines: dict[str, deque[_Line]] = {}
        self._present: defaultdict[str, _Presence] = defaultdict(_Presence)
        self._engine_times: defaultdict[str, EngineTime] = defaultdict(
            lambda: EngineTime(1000 * USUAL_S)
        )

    def offered(self, task: Task) -> None:
        """Learn the value of engine time from the end of ``task``, which has just arrived."""
        if task.priority is Priority.INTERACTIVE:
            task.on_end.append(self._ended)

    def _ended(self, task: Task) -> None:
        if task.ending is None or task.ending.outcome in (Outcome.ABORTED, Outcome.FAILED):
            return
        used_ms = self._forecaster.used_ms(task, self._clock.now())
        met = task.ending.outcome in (Outcome.MET, Outcome.PARTIAL)
        self._engine_times[task.model].ended(used_ms, met=met)

    def of(self, task: Task, enough: float = 0.0, *, guesses: bool = False) -> Prospect:
        """The prospect of ``task``, which waits or arrives now. It is ``UNKNOWN`` if too few steps
        were measured and not ``guesses``; clients may get guesses.

        The prospect is that of its place in the queue. If its gain is below ``enough``, a place
        before all with later deadlines (whose jobs are paused) and then fewer rows are tried; the
        best prospect is returned. The former counts only if a job has ample time or the task may
        get a row at once (``may_get_row``).
        """
        line = self._line(task.model, task.priority)
        if line is None or not (guesses or self._knows(task.model)):
            return UNKNOWN
        others, place = line, self._place(task, line)
        if self._waits_in(line, task):
            others = self._keep(task.model, line.without(place))
            found = self._prospect(task, line, place, others)
        else:
            found = self._at(place, task, others, enough)
        if found.gain >= enough or not self.may_free_row(task):
            return found
        if place >= line.machine.rows and (_has_ample(line, task) or self.may_get_row(task)):
            earlier = self._by_deadline(place, task, others)
            found = max(found, earlier, key=lambda prospect: prospect.gain)
        if found.gain >= enough or not self.adapts_rows(task.model):
            return found
        return max(found, self._among_fewer(task), key=lambda prospect: prospect.gain)

    def _by_deadline(self, place: int, task: Task, others: _Line) -> Prospect:
        """The prospect of ``task`` before all with a later deadline, running ones included.

        Those with an earlier one, which may have been admitted to such places, keep theirs: a crowd
        of newcomers gets the paused jobs' rows once.
        """
        own = task.deadline.left_ms(others.at), place
        is_after = [(one.stop_ms, at) >= own for at, one in enumerate(others.asked)]
        order = sorted(range(len(is_after)), key=is_after.__getitem__)
        tasks = [others.tasks[at] for at in order]
        line = self._kept(task.model, tasks, others.machine, others.at)
        if line is None:
            asked = [others.asked[at] for at in order]
            line = self._keep(task.model, _Line(others.machine, tasks, asked, others.at))
        return self._at(is_after.count(False), task, line)

    def _among_fewer(self, task: Task) -> Prospect:
        """The prospect of ``task`` if jobs with ample time are paused until steps are fast enough
        for it."""
        everybody = self._line(task.model, Priority.BATCH)
        if task.priority is Priority.BATCH or everybody is None:
            return HOPELESS
        if self._waits_in(everybody, task):
            everybody = everybody.without(everybody.tasks.index(task))
        asked = self._forecaster.asked(task, self._clock.now())
        key = task.tenant, *_about(asked)
        if key not in everybody.prospects:
            everybody.prospects[key] = _among_fewer(task, asked, everybody)
        return everybody.prospects[key]

    def start_ms(self, task: Task) -> float:
        """Ms from now until ``task`` probably starts."""
        line = self._line(task.model, task.priority)
        if line is None or (place := self._place(task, line)) < line.machine.rows:
            return 0.0
        if self._waits_in(line, task):
            return float(np.median(line.played.start_ms[:, place]))
        return at_share(self._at(place, task, line).start_ms, USUAL)

    def left_ms(self, task: Task) -> float:
        """Ms from now until ``task``, which runs or waits, probably ends: at its deadline at the
        latest."""
        left_ms = max(0.0, task.deadline.left_ms(self._clock.now()))
        line = self._line(task.model, Priority.BATCH)
        if line is None:
            return min(left_ms, FIRST_GUESS_MS)
        if task in line.tasks:
            return min(left_ms, float(np.median(line.played.end_ms[:, line.tasks.index(task)])))
        # Its instance takes no new work: assume as many rows as on the other instances.
        machine, asked = line.machine, self._forecaster.asked(task, self._clock.now())
        rows = np.array(float(min(len(line.tasks), machine.rows)))
        step_ms = float(machine.steps_ms(rows, rows * float(asked.context_tokens)))
        return min(left_ms, asked.prompt_ms + at_share(asked.left, USUAL) * step_ms)

    def room_ms(self, model: str) -> float:
        """Ms from now until the queue has room for one more task: until one starts or expires."""
        now = self._clock.now()
        leaves_at = self._queue.next_expiry
        room_ms = FIRST_GUESS_MS if leaves_at is None else 1000 * (leaves_at - now)
        line = self._line(model, Priority.BATCH)
        if line is not None and line.tasks:
            # The first start of a waiting task makes room, or, if none waits, the first end.
            waiting = [at for at, task in enumerate(line.tasks) if task in self._queue]
            soon = line.played.start_ms[:, waiting] if waiting else line.played.end_ms
            room_ms = min(room_ms, line.machine.base_ms + float(np.median(soon.min(axis=1))))
        return max(1.0, room_ms)

    def chances(self, model: str) -> dict[Task, float]:
        """The chance of each waiting task of ``model``, up to ``MOST`` of them."""
        chances: dict[Task, float] = {}
        for priority in Priority:
            line = self._line(model, priority)
            if line is None or not self._queue or not self._knows(model):
                continue
            found = zip(line.tasks, line.chances.tolist(), strict=True)
            of = ((task, chance) for task, chance in found if task.priority is priority)
            chances |= {task: chance for task, chance in of if task in self._queue}
        return chances

    def most_rows(self, model: str) -> dict[str, float]:
        """Most rows per instance, by address, for tasks that were admitted on that condition. The
        limit of ``""`` holds for all instances: waiting tasks may start on any."""
        line, most = self._line(model, Priority.BATCH), dict[str, float]()
        for task in line.tasks if line else ():
            if task.most_rows < math.inf and not task.paused_on:
                most[task.instance] = min(task.most_rows, most.get(task.instance, math.inf))
        return most

    def count(self, model: str) -> int:
        """The number of running and waiting requests for ``model``, up to ``MOST``."""
        line = self._line(model, Priority.BATCH)
        return 0 if line is None else len(line.tasks)

    def met_with(self, model: str, rows: Sequence[int], foreign: int = 0) -> Iterator[float]:
        """Simulate each number of ``rows`` per instance. Yields the share (0 to 1) of running and
        waiting requests for ``model`` that is met, weighted by tenants' shares; nothing if unknown.

        ``foreign``: rows of the instances that other orchestrators use. Batch work is assumed to
        run in the remaining rows. Gaps between tokens do not count: workers keep those themselves
        (``worker.scheduler.scheduler``).
        """
        everything = self._line(model, Priority.BATCH)
        if everything is None or not everything.tasks or not self._knows(model):
            return
        line = self._line(model, Priority.INTERACTIVE)
        if line is None or not line.tasks:
            line = everything
        table = Table.of([one._replace(gap_ms=math.inf) for one in line.asked], ROW_DRAWS)
        tenants = Counter(task.tenant for task in line.tasks)
        share = len(line.tasks) / len(tenants)
        weights = np.array([min(1.0, share / tenants[task.tenant]) for task in line.tasks])
        instances = line.machine.instances
        beside = len(everything.tasks) - len(line.tasks) + foreign
        for count in rows:
            machine = line.machine._replace(
                rows=max(1, count * instances - foreign),
                beside=beside,
                spread=0.0,  # a slower machine is slower at every number of rows
            )
            yield float(play(table, machine).chances(table) @ weights / weights.sum())

    def _knows(self, model: str) -> bool:
        return self._forecaster.knows(model, self._clock.now())

    def _at(self, place: int, task: Task, others: _Line, enough: float = 0.0) -> Prospect:
        """The prospect of ``task`` behind ``place`` of ``others``. Equal requests that arrive at
        the same time share one."""
        asked = self._forecaster.asked(task, self._clock.now())
        key = (place, task.tenant, task.priority, task.job.on_deadline, *_about(asked))
        found = others.prospects.get(key)
        if found is None and place == len(others.tasks) >= others.machine.rows:
            behind = others.played.behind(asked)
            chance = float(behind.chances([asked])[0])
            if chance < enough:  # whatever others lose
                found = others.prospects[key] = _outlook(chance, chance, behind, 0)
        if found is None:
            line = self._keep(task.model, others.with_one(place, task, asked))
            found = others.prospects[key] = self._prospect(task, line, place, others)
        return found

    def _prospect(self, task: Task, line: _Line, place: int, others: _Line) -> Prospect:
        """The prospect of ``task`` at its ``place`` in ``line``; ``others`` is that line without
        it.

        During the task's stay, requests like those that it delays now come and go: each loss counts
        once per stay of such a request in that time. When engine time is scarce, some of those are
        given up for others, so their total loss is at most the value of the task's engine time.
        """
        lost = others.chances - np.delete(line.chances, place)
        lost *= _weights(task, others.tasks)
        loss, played = float(lost.sum()), line.played
        if lost.any():
            stay_ms = np.minimum(played.end_ms, [one.stop_ms for one in line.asked]).mean(axis=0)
            own_ms = stay_ms[place] - played.start_ms[:, place].mean()
            received = np.array([other.marks.received for other in others.tasks])
            stay_ms = np.delete(stay_ms, place) + 1000 * np.maximum(0.0, line.at - received)
            later = float(lost @ np.maximum(1.0, own_ms / np.maximum(1.0, stay_ms)))
            work_ms = self._forecaster.urgency(task, self._clock.now()).work_ms
            worth = self._engine_times[task.model].worth * work_ms
            loss = min(LOSS_WEIGHT * later, max(LOSS_WEIGHT * loss, worth))
        chance = float(line.chances[place])
        return _outlook(chance, chance - loss, played, place)

    def _line(self, model: str, priority: Priority) -> _Line | None:
        """The line of ``model`` for a task of ``priority``. Interactive work sees no batch work,
        which gives way to it (DL-8). None if no instance serves ``model``."""
        now = self._clock.now()
        machine = self._forecaster.machine(model, now)
        if machine is None:
            return None
        everything = self._tasks(model)
        urgent = [task for task in everything if task.priority is Priority.INTERACTIVE]
        present = self._present[model]
        present.see(len(urgent), len(everything), now)
        is_urgent = priority is Priority.INTERACTIVE
        tasks = urgent if is_urgent else everything
        machine = machine._replace(usual=round(present.urgent if is_urgent else present.all))
        line = self._kept(model, tasks, machine, now)
        if line is None:
            asked = [self._forecaster.asked(task, now) for task in tasks]
            line = self._keep(model, _Line(machine, tasks, asked, now))
        return line

    def _kept(self, model: str, tasks: list[Task], machine: Machine, now: float) -> _Line | None:
        """The cached line of these ``tasks``, if it is fresh."""
        for line in self._lines.get(model, ()):
            if now - line.at < FRESH_S and line.tasks == tasks and line.machine == machine:
                return line
        return None

    def _keep(self, model: str, line: _Line) -> _Line:
        """Cache ``line``: an admission or a refusal turns the present line into a simulated one."""
        self._lines.setdefault(model, deque(maxlen=KEPT)).append(line)
        return line

    def _waits_in(self, line: _Line, task: Task) -> bool:
        return task in self._queue and task in line.tasks

    def _place(self, task: Task, line: _Line) -> int:
        """The number of requests of ``line`` before ``task``."""
        if self._waits_in(line, task):
            return line.tasks.index(task)
        waiting = sum(other in self._queue for other in line.tasks)
        return len(line.tasks) - waiting + min(waiting, self._queue.place_of(task))

    def _tasks(self, model: str) -> list[Task]:
        """Running tasks, then waiting tasks in order; at most ``MOST`` together."""
        jobs = (job.task for job in self._running if not job.is_paused)
        running = list(dict.fromkeys(task for task in jobs if task.model == model))
        fast = self._forecaster.fast_instances(model, self._clock.now())
        running = [task for task in running if not fast.isdisjoint((task.instance, ""))]
        # Decoding rows make their next token before any prompt is done.
        running.sort(key=lambda task: not task.completion_tokens)
        most = max(0, MOST - len(running))
        return running + [task for task in self._queue.first(most) if task.model == model]


def _has_ample(line: _Line, task: Task) -> bool:
    """Whether a request of ``line`` has ample time for ``task``."""
    enough_ms = AMPLE * task.deadline.left_ms(line.at)
    return any(one.stop_ms >= enough_ms for one in line.asked)


@lru_cache
def row_counts(most: int) -> tuple[int, ...]:
    """The numbers of rows to try, up to ``most``: two for each doubling."""
    found = {round(2 ** (half / 2)) for half in range(1 + int(2 * math.log2(most)))}
    return tuple(sorted(found | {most}))


def _among_fewer(task: Task, asked: Asked, everybody: _Line) -> Prospect:
    machine, best = everybody.machine, HOPELESS
    # The most urgent keep their rows; paused ones must belong to the task's tenant (OR-24).
    order = sorted(range(len(everybody.asked)), key=lambda at: everybody.asked[at].stop_ms)
    enough_ms = AMPLE * asked.stop_ms
    if not order or everybody.asked[order[-1]].stop_ms < enough_ms:
        return best
    delay_ms = 1000 * ROWS_EVERY_S
    own = asked._replace(
        stop_ms=asked.stop_ms - delay_ms,
        whole_ms=asked.whole_ms - delay_ms,
        first_ms=asked.first_ms - delay_ms,
    )
    if not play([own], machine._replace(usual=0)).chances([own])[0]:
        return best
    line = [own, *(everybody.asked[at] for at in order)]
    now = min(len(line), machine.rows) // machine.instances
    for rows in reversed(row_counts(max(1, now))[:-1]):
        paused = order[rows * machine.instances - 1 :]
        if best.chance == 1 or everybody.asked[paused[0]].stop_ms < enough_ms:
            break
        if any(everybody.tasks[at].tenant != task.tenant for at in paused):
            break
        fewer = machine._replace(rows=rows * machine.instances)
        played = play(line, fewer)
        chance, *others = played.chances(line).tolist()
        if min(others) < 1:
            break
        if chance > best.chance:
            best = _outlook(chance, chance, played, 0)._replace(most_rows=rows)
    return best


def _outlook(chance: float, gain: float, played: Played, at: int) -> Prospect:
    start, first, end = (
        tuple(sorted(times[:, at].tolist()))
        for times in (played.start_ms, played.first_ms, played.end_ms)
    )
    return Prospect(chance, gain, start, first, end)


def _about(asked: Asked) -> tuple[Hashable, ...]:
    """The properties of ``asked`` without its identity; times are rounded to ``FRESH_S``."""
    times = (asked.stop_ms, asked.whole_ms, asked.first_ms)
    near = (ms if ms == math.inf else round(ms / (1000 * FRESH_S)) for ms in times)
    return asked.left, asked.prompt_ms, asked.gap_ms, *near


def _weights(task: Task, others: Sequence[Task]) -> NDArray[np.float64]:
    """Weights (0 to 1) of the losses of ``others`` by ``task``: 0 if the task is batch work, which
    waits for them anyway, or if its answer is cut to the available time. A tenant with more
    requests than the task's tenant weighs only as much as an equal number of them."""
    if task.priority is Priority.BATCH or task.job.on_deadline is not OnDeadline.ERROR:
        return np.zeros(len(others))
    counts = Counter(other.tenant for other in others)
    own = max(1, counts[task.tenant])
    return np.array([min(1.0, own / counts[other.tenant]) for other in others])
