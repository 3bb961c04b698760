"""The choices of one request. Each choice is a task; they succeed or fail together.

All have the request's deadline, and all end when the client disconnects. If one fails, the request
ends, because the others are useless without it.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from orchestrator.admission.reader import Reading, reading_of
from orchestrator.api.openai.echo import require_few
from orchestrator.api.openai.shapes import usage
from orchestrator.api.openai.types import ParsedCompletion, tier_of
from orchestrator.service import Orchestrator
from orchestrator.tasks.job import Prompt
from orchestrator.tasks.task import Listener, Task

AT_ONCE = 2
"""Tasks started or ended per pass of the event loop, so that none waits for all of them."""


class Choices:
    """The tasks of one request: ``n`` per prompt, in the order of the prompts."""

    def __init__(self, orchestrator: Orchestrator, request: ParsedCompletion) -> None:
        self.request = request
        self.tasks: list[Task] = []
        self.failed: Task | None = None
        """The first task that failed. The others are cancelled then."""
        self._orchestrator = orchestrator
        self._read_ahead: deque[Task] = deque()
        """The first task of each prompt whose choices have not started."""
        self._readings: deque[Reading] = deque()
        """Parallel to ``_read_ahead``: the encoded prompt, for its other tasks."""
        self._listeners: list[Listener] = []
        self.count = self._left = len(request.prompts) * request.n

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of the choice with that index."""
        return self.request.prompts[index // self.request.n]

    @property
    def first(self) -> Task | None:
        """The task that gives the whole answer its id; None until it is submitted."""
        return self.tasks[0] if self.tasks else None

    async def submit(self, listener_of: Callable[[int], Listener]) -> None:
        """Offer all tasks, each with a listener for its index, until one fails. Raises the first
        refusal. The caller must always call ``leave`` afterwards."""
        n = self.request.n
        if self.count > 1:
            field = "n" if n > 1 else "prompt"
            self._orchestrator.require_room_for(self.request.job, self.count, field)
        await self._read()
        for prompt in self.request.prompts:
            reading = self._readings.popleft()
            for draw in range(n):
                if self.tasks and len(self.tasks) % AT_ONCE == 0:
                    await asyncio.sleep(0)
                    if self._stopped():
                        return
                # Make the listener first: this raises an error if the model is gone.
                listener = listener_of(len(self.tasks))
                if draw == 0:
                    task = self._read_ahead.popleft()
                else:
                    asked = self.request.job
                    job = replace(asked, sampling=asked.sampling.for_choice(draw))
                    task = await self._orchestrator.prepare(job, prompt, reading)
                self._listeners.append(listener)
                self.tasks.append(task)
                task.leader_id = self.tasks[0].id
                self._orchestrator.offer(task, [listener])
                if self._stopped():
                    return

    def ended(self, task: Task) -> bool:
        """Note that a task has ended. Returns whether the request is over: its last task ended, or
        this one failed. Called while a lane's frame is processed, so the other tasks are ended a
        moment later."""
        assert task.ending is not None
        if task.ending.error is None:
            self._left -= 1
            return self._left == 0
        self.failed = task
        self._unlisten()
        asyncio.get_running_loop().call_soon(self.cancel)
        return True

    def cancel(self) -> None:
        """Cancel the tasks that have not ended."""
        self._end(self._orchestrator.cancel)

    def leave(self, *, too_slow: bool = False) -> None:
        """Stop following the tasks. Their job decides whether running tasks continue."""
        self._unlisten()
        self._end(lambda task: self._orchestrator.disconnected(task, too_slow=too_slow))

    def mark_reading(self, keeps_up: bool) -> None:
        for task in self.tasks:
            self._orchestrator.mark_reading(task, keeps_up)

    def usage(self) -> dict[str, object]:
        return usage(self.tasks, self.request.n)

    def told_tier(self) -> dict[str, object]:
        """``service_tier``, if the client asked for one."""
        if not self.request.options.tier:
            return {}
        return {"service_tier": tier_of(self.request.job.priority)}

    async def _read(self) -> None:
        """Encode all prompts before the first task starts. No text can be sent before it is known
        that the last prompt can be served."""
        for prompt in self.request.prompts:
            if self._read_ahead and len(self._read_ahead) % AT_ONCE == 0:
                await asyncio.sleep(0)
            task = await self._orchestrator.prepare(self.request.job, prompt)
            self._read_ahead.append(task)
            encoder = self._orchestrator.models.resolve(task.served_name)
            self._readings.append(reading_of(task, encoder))
        if self.request.options.echo:
            top = self.request.job.sampling.prompt_logprobs
            tokens = self.request.n * sum(task.prompt_tokens for task in self._read_ahead)
            as_ids = not all(isinstance(prompt, str) for prompt in self.request.prompts)
            is_long = self.request.is_streamed and (as_ids or top is not None)
            require_few(tokens, top, is_streamed=is_long)

    def _stopped(self) -> bool:
        """Whether a task has failed, so that no more are offered. If so, cancels the others."""
        if self.failed is None:
            return False
        self._unlisten()
        self.cancel()
        return True

    def _end(self, end: Callable[[Task], None]) -> None:
        """End tasks, last first: a waiting task must not start in the place of an ended one."""
        tasks = [*self.tasks, *self._read_ahead]
        _end_some(end, [task for task in tasks if task.ending is None])

    def _unlisten(self) -> None:
        for task, listener in zip(self.tasks, self._listeners, strict=True):
            task.unlisten(listener)


def _end_some(end: Callable[[Task], None], tasks: list[Task]) -> None:
    for _ in range(min(AT_ONCE, len(tasks))):
        end(tasks.pop())
    if tasks:
        asyncio.get_running_loop().call_soon(_end_some, end, tasks)
