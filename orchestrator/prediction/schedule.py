"""The schedule of a model's instances as it is now, played forward (``forecast``).

What runs comes first, then what waits, in the order of the queue. From this follow the chance of a
request, what others would lose by it, and when it will start and end.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from orchestrator.clock import Clock
from orchestrator.prediction.batch_size import BATCH_WEIGHT
from orchestrator.prediction.forecast import Asked, Machine, Played, play
from orchestrator.prediction.forecaster import Forecaster
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.tasks.job import Priority
from orchestrator.tasks.task import Task
from protocol import OnDeadline

MOST: Final = 256
"""Most requests that are played, the first in order: 400 took 4 ms of CPU. What waits behind them
is taken to come right after."""
LOSS_WEIGHT: Final = 0.5
"""Part of the chances which others lose that counts: what they have is too hopeful, for later
requests take of it, and a worker holds a prompt up before rows miss a token. In 9 cells of the
simulator 0, 0.5 and 1 met 0.995, 1.030 and 1.029 of what was met without; with 1, conversations
with deadlines for parts met 0.85 at twice the capacity, with 0.5 no cell met less than 0.99."""
ALL_MET: Final = 0.95
"""Mean chance from which all are taken to be met."""
_FIRST_GUESS_MS: Final = 1000.0


class RunningJob(Protocol):
    """The part of a job on a worker that predictions read."""

    @property
    def task(self) -> Task: ...
    @property
    def is_paused(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Prospect:
    """What is to be expected of one request. Times are equally likely, in ms from now, rising."""

    chance: float
    """Chance (0 to 1) that every stated part of it is in time."""
    gain: float
    """``chance`` less what others lose by it (``LOSS_WEIGHT``)."""
    start_ms: tuple[float, ...]
    first_ms: tuple[float, ...]
    """When its first token comes."""
    end_ms: tuple[float, ...]
    """When its answer is complete, at its own length, whatever its deadline is."""

    @classmethod
    def of(cls, played: Played, place: int, chance: float, lost: float) -> "Prospect":
        own = (each[:, place] for each in (played.start_ms, played.first_ms, played.end_ms))
        return cls(chance, chance - LOSS_WEIGHT * lost, *(tuple(sorted(ms.tolist())) for ms in own))


UNKNOWN: Final = Prospect(1.0, 1.0, (0.0,), (0.0,), (0.0,))
"""The prospect where too few steps were measured yet: ignorance refuses nobody."""


def middle(times: Sequence[float]) -> float:
    return times[len(times) // 2]


class _Present(NamedTuple):
    """What runs and what waits for a model, in order."""

    machine: Machine
    running: list[Task]
    waiting: list[Task]


class _Line(NamedTuple):
    """A request in the line of all others; ``place`` is how many of them are before it."""

    machine: Machine
    others: list[Task]
    asked: list[Asked]
    own: Asked
    place: int

    def with_own(self, place: int) -> list[Asked]:
        return [*self.asked[:place], self.own, *self.asked[place:]]


class Schedule:
    """Plays what runs and what waits for a model."""

    def __init__(
        self,
        queue: TaskQueue[Task],
        forecaster: Forecaster,
        running: Iterable[RunningJob],
        clock: Clock,
    ) -> None:
        """``running`` iterates all jobs on workers, as they are at that moment."""
        self._queue = queue
        self._forecaster = forecaster
        self._running = running
        self._clock = clock

    def of(self, task: Task, enough: float = 0.0) -> Prospect:
        """The prospect of ``task``, which waits, or would come now.

        It is that of its place in the queue. Where this gains less than ``enough`` and every row is
        taken, it is that of a row which it gets at once, from a job that is paused for it, if that
        is better.
        """
        line = self._line(task)
        if line is None or not self._knows(task.model):
            return UNKNOWN
        alone = play(line.asked, line.machine).chances(line.asked)
        weights = _weights(task, line.others)

        def at(place: int) -> Prospect:
            every = line.with_own(place)
            played = play(every, line.machine)
            chances = played.chances(every)
            lost = float(((alone - np.delete(chances, place)) * weights).sum())
            return Prospect.of(played, place, float(chances[place]), lost)

        found = at(line.place)
        if found.gain >= enough or line.place < line.machine.rows:
            return found
        return max(found, at(0), key=lambda prospect: prospect.gain)

    def start_ms(self, task: Task) -> tuple[float, ...]:
        """Equally likely times in ms from now until ``task`` starts, rising."""
        line = self._line(task)
        if line is None or line.place < line.machine.rows:
            return (0.0,)
        played = play(line.with_own(line.place), line.machine)
        return tuple(sorted(played.start_ms[:, line.place].tolist()))

    def room_ms(self, model: str) -> float:
        """Ms from now until the queue has room for one more task: one starts, or gives up."""
        now = self._clock.now()
        leaves_at = self._queue.next_expiry
        room_ms = _FIRST_GUESS_MS if leaves_at is None else 1000 * (leaves_at - now)
        line = self._present(model)
        if line is not None and (asked := self._asked(line)):
            played = play(asked, line.machine)
            # The first that starts makes room in the queue, or the first that ends beyond it.
            soon = played.start_ms[:, len(line.running) :] if line.waiting else played.end_ms
            room_ms = min(room_ms, line.machine.base_ms + float(np.median(soon.min(axis=1))))
        return max(1.0, room_ms)

    def chances(self, model: str) -> dict[Task, float]:
        """The chance of each task of ``model`` that waits, up to ``MOST`` of them."""
        line = self._present(model)
        if line is None or not line.waiting or not self._knows(model):
            return {}
        asked = self._asked(line)
        found = play(asked, line.machine).chances(asked)[len(line.running) :]
        return dict(zip(line.waiting, found.tolist(), strict=True))

    def meets_all(self, model: str, rows: int) -> bool:
        """Whether all that runs or waits would be met with so many rows an instance."""
        line = self._present(model)
        if line is None or not self._knows(model):
            return True
        asked = self._asked(line)
        machine = line.machine._replace(rows=rows * line.machine.instances)
        return not asked or float(play(asked, machine).chances(asked).mean()) >= ALL_MET

    def _knows(self, model: str) -> bool:
        return self._forecaster.knows(model, self._clock.now())

    def _present(self, model: str) -> _Present | None:
        """All that runs or waits for ``model``; None where nothing serves it."""
        now = self._clock.now()
        machine = self._forecaster.machine(model, now)
        if machine is None:
            return None
        return _Present(machine, *self._tasks(model))

    def _asked(self, line: _Present) -> list[Asked]:
        now = self._clock.now()
        return [self._forecaster.asked(task, now) for task in line.running + line.waiting]

    def _line(self, task: Task) -> _Line | None:
        """The line with ``task`` at its place; None where nothing serves its model."""
        now, asked = self._clock.now(), self._forecaster.asked
        machine = self._forecaster.machine(task.model, now)
        if machine is None:
            return None
        running, waiting = self._tasks(task.model)
        at = self._queue.place_of(task)
        before = [other for other in waiting[:at] if other is not task]
        behind = [other for other in waiting[at:] if other is not task]
        others = running + before + behind
        own = asked(task, now)
        return _Line(
            machine,
            others,
            [asked(other, now) for other in others],
            own,
            len(running) + len(before),
        )

    def _tasks(self, model: str) -> tuple[list[Task], list[Task]]:
        """Tasks that run and tasks that wait, in order, at most ``MOST`` together."""
        jobs = (job.task for job in self._running if not job.is_paused)
        running = list(dict.fromkeys(task for task in jobs if task.model == model))
        fast = self._forecaster.fast_instances(model, self._clock.now())
        running = [task for task in running if not fast.isdisjoint((task.instance, ""))]
        # Rows that decode make their next token before anybody's prompt is done.
        running.sort(key=lambda task: not task.completion_tokens)
        most = max(0, MOST - len(running))
        return running, [task for task in self._queue.first(most) if task.model == model]


def _weights(task: Task, others: Sequence[Task]) -> NDArray[np.float64]:
    """What a loss of each of ``others`` counts against ``task``: nothing where the task is batch
    work, which waits for them in any case, or is cut to what time there is; of a tenant with more
    requests than the task's own only as much as an equal share of them."""
    if task.priority is Priority.BATCH or task.job.on_deadline is not OnDeadline.ERROR:
        return np.zeros(len(others))
    counts = Counter(other.tenant for other in others)
    own = max(1, counts[task.tenant])
    return np.array(
        [
            min(1.0, own / counts[other.tenant])
            * (BATCH_WEIGHT if other.priority is Priority.BATCH else 1.0)
            for other in others
        ]
    )
