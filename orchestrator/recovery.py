"""Takes over an earlier process's unfinished durable tasks (OR-5).

::

    past its deadline       ─▶ ended as missed
    nothing generated yet   ─▶ queued again, with its own deadlines
    tokens in the journal   ─▶ continued after them, if that is exact (``resume``)
                            ─▶ else regenerated from the prompt with the same seed, and compared
                               with the old text: a text never changes halfway
                            ─▶ else generated again, if the client said ``idempotent``
                            ─▶ else failed; its client may send it again

This happens before any request is served, and no limit refuses it. A task whose model is not
available yet waits here, at most until its deadline.

Clients may follow a task at once. How its earlier text continues is known only when its model is
available. Until then the text is the task's ``earlier``, and ``Task.restore`` sends it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from orchestrator.dispatch.resume import is_resumable, looks_back
from orchestrator.prompts.encoder import PromptEncoder
from orchestrator.service import Orchestrator
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.journal.durable import DurableTasks
from orchestrator.tasks.journal.records import (
    Accept,
    UnfinishedTask,
    bare_job,
    live_task,
    unpack_ids,
)
from orchestrator.tasks.task import EarlierText, Task
from orchestrator.tasks.verdicts import differs, lost_in_restart, overdue
from orchestrator.telemetry.log import fields, service_log
from protocol import FinishReason, Outcome

FIRST_TOKEN_ID = 2
"""Number of the first token's event."""
_BEYOND_ALL = 10**9
"""An event number above all real ones, for tasks whose planned length is unknown."""
_TASKS_AT_A_TIME = 32
"""Number of tasks to recover before the event loop gets a turn: some milliseconds of work."""
_MAX_HELD_BACK = 16
"""Maximum number of last journaled tokens whose text may be half a character."""


class Recovery:
    """Takes over tasks once; then follows those that wait for their model."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        durable: DurableTasks,
        unfinished: Sequence[UnfinishedTask],
    ) -> None:
        self._orchestrator = orchestrator
        self._durable = durable
        self._unfinished = unfinished
        self._waiting: dict[Task, UnfinishedTask] = {}
        orchestrator.registry.listen(self.instances_changed)

    def steps(self) -> Iterator[None]:
        """Take over all unfinished tasks, some per step. Call it after the journal is written."""
        unfinished, self._unfinished = self._unfinished, ()
        return self._take_all_on(unfinished)

    def take_over(self, unfinished: Sequence[UnfinishedTask]) -> None:
        """Take over tasks that another orchestrator left, or had when it died."""
        for _ in self._take_all_on(unfinished):
            pass

    def take_back(self) -> None:
        left = self._durable.take_back()
        for task, _ in left:
            self._orchestrator.store.forget(task)
        for _ in self._take_all_on([one for _, one in left], are_new=False):
            pass

    def _take_all_on(
        self, unfinished: Sequence[UnfinishedTask], *, are_new: bool = True
    ) -> Iterator[None]:
        for number, one in enumerate(unfinished, 1):
            try:
                self._take_on(one, is_new=are_new)
            except Exception:  # one unreadable task must not block the others
                service_log.exception("a task was not recovered", extra=fields(task_id=one.row.id))
            if number % _TASKS_AT_A_TIME == 0:
                yield
        if unfinished:
            service_log.info(
                "took over durable tasks of another process"
                if are_new
                else "durable tasks that were left to the next process continue in this one",
                extra=fields(tasks=len(unfinished), **self._durable.recovered),
            )
        self.instances_changed()

    def instances_changed(self) -> None:
        for task, one in list(self._waiting.items()):
            if task.ending is not None:
                del self._waiting[task]
                continue
            encoder = self._orchestrator.models.by_name().get(task.model)
            if encoder is None:
                self._orchestrator.stages.demand.want(task.model)
            else:
                del self._waiting[task]
                try:
                    self._go_on(task, one, encoder)
                except Exception:
                    service_log.exception("a task was not recovered", extra=fields(task_id=task.id))
                    self._lose(task, "its stored tokens do not fit")

    def _take_on(self, one: UnfinishedTask, *, is_new: bool) -> None:
        orchestrator, clock = self._orchestrator, self._orchestrator.clock
        stored = one.request
        known = unpack_ids(one.tokens.ids)
        if stored is None:
            task = Task(one.row.id, bare_job(one.row, clock))
            task.model = one.row.model
            task.first_id_free = _BEYOND_ALL
        else:
            task = live_task(one.row, stored, clock, self._durable.boot)
            task.first_id_free = FIRST_TOKEN_ID + task.sampling.max_tokens + 2
        task.time_spent.restore(one.tokens.spent_s, clock.now())
        if known:
            task.earlier = EarlierText(
                known, one.tokens.texts, lambda: orchestrator.end(task, differs(task))
            )
        orchestrator.readmit(task, is_new=is_new)
        self._durable.adopt(task, Accept(one.row, stored), len(known))
        now = clock.now()
        if task.deadline.left_ms(now) <= 0:
            self._end(task, "expired", overdue(task, now))
        elif stored is None:
            self._lose(task, "its stored request is unreadable")
        else:
            task.timer = clock.call_at(task.deadline.at, lambda: self._expire(task))
            self._waiting[task] = one

    def _expire(self, task: Task) -> None:
        """End a task whose deadline passed before its model was available."""
        del self._waiting[task]
        self._end(task, "expired", overdue(task, self._orchestrator.clock.now()))

    def _go_on(self, task: Task, one: UnfinishedTask, encoder: PromptEncoder) -> None:
        stored = one.request
        assert stored is not None
        card = encoder.card
        task.model, task.adapter = card.model, encoder.adapter
        if task.timer is not None:
            task.timer.cancel()
            task.timer = None
        task.block_tokens = card.block_tokens
        most = task.prompt_tokens + task.sampling.max_tokens
        if encoder.vocabulary != task.vocabulary or most > card.context_tokens:
            self._lose(task, "the model now has another vocabulary or context")
            return
        if task.earlier is None:
            self._durable.recovered["queued"] += 1
        elif encoder.weights_digest == stored.model_digest:
            self._continue(task, task.earlier, encoder)
            if task.ending is not None:
                return
        elif task.job.idempotent:
            self._durable.recovered["repeated"] += 1
            self._make_anew(task)
        else:
            self._lose(task, "the model now has other weights")
            return
        self._orchestrator.requeue(task)

    def _continue(self, task: Task, earlier: EarlierText, encoder: PromptEncoder) -> None:
        """Continue after the journaled tokens, or regenerate the same text."""
        known = _whole_characters(earlier, encoder)
        needs_continue = looks_back(task.sampling)
        if (
            not known
            or not is_resumable(task.sampling)
            # Log-probabilities are not journaled.
            or task.sampling.logprobs is not None
            or task.sampling.prompt_logprobs is not None
            or (needs_continue and not encoder.card.can_continue)
        ):
            self._durable.recovered["remade"] += 1
            if task.job.idempotent:
                self._make_anew(task)
            return
        task.earlier = replace(earlier, ids=earlier.ids[:known], texts=earlier.texts[:known])
        task.restore()
        task.is_resumable = True
        task.begun_by_weights = encoder.card.model_digest
        task.needs_continue = needs_continue
        reason = _finish_reason(task, earlier.ids[:known], encoder)
        if reason is None:
            self._durable.recovered["continued"] += 1
            return
        # The text was complete; only its worker's ``End`` was missing.
        self._end(task, "continued", Ending(Outcome.MET, reason))

    def _make_anew(self, task: Task) -> None:
        task.earlier = None
        assert task.entry is not None
        task.entry.keeps_tokens = False

    def _lose(self, task: Task, why: str) -> None:
        self._end(task, "failed", lost_in_restart(task, why))

    def _end(self, task: Task, how: str, ending: Ending) -> None:
        self._durable.recovered[how] += 1
        self._orchestrator.stages.settler.settle(task, ending)


def _whole_characters(text: EarlierText, encoder: PromptEncoder) -> int:
    """Most leading tokens whose text ends in a whole character; 0 if not among the last few."""
    ids, texts = text.ids, text.texts
    for known in range(len(ids), max(0, len(ids) - _MAX_HELD_BACK), -1):
        if encoder.tokens.text_of(ids[:known]) == "".join(texts[:known]):
            return known
    return 0


def _finish_reason(task: Task, ids: list[int], encoder: PromptEncoder) -> FinishReason | None:
    """The finish reason of a text that lacks only its ``End``; None for any other text."""
    if ids[-1] in encoder.card.eos_token_ids and not task.sampling.ignore_eos:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(ids) >= task.sampling.max_tokens else None
