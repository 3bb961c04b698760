"""One response in the making: listens to its task, and renders its current state."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from orchestrator.api.http.outputs import TaskOutput
from orchestrator.api.http.tools import read_call
from orchestrator.api.openai.responses.output import ItemKind, OutputItems
from orchestrator.api.openai.responses.shapes import logprobs_of, response, status_of
from orchestrator.api.openai.responses.types import ParsedResponses
from orchestrator.api.openai.shapes import TokenOf
from orchestrator.errors import InvalidRequest
from orchestrator.parsing import Piece, Reasoning
from orchestrator.tasks.job import Message
from orchestrator.tasks.task import Task
from orchestrator.tasks.tools import ToolCall
from orchestrator.tasks.work import Stage
from protocol import Delta, TokenLogprob


class OutputCollector:
    """Collects a task's output. ``output`` parses what the model says; None: all of it is text.
    ``keep`` is called at the end."""

    def __init__(
        self,
        asked: ParsedResponses,
        output: TaskOutput | None,
        token_of: TokenOf,
        keep: Callable[[Task, "OutputCollector"], None],
    ) -> None:
        self.asked = asked
        self.complete = asyncio.Event()
        self.is_plain = output is None and asked.job.sampling.logprobs is None
        """Whether all of the output is the text of one message."""
        self._items = OutputItems(self._tell)
        self._has_begun = False
        self._output = output
        self._token_of = token_of
        self._keep = keep
        self._logprobs: list[object] = []
        """Log-probabilities of tokens whose text is still to come."""
        self._tokens = 0
        self._reasoning_tokens = 0

    # as a listener

    def started(self, task: Task) -> None:
        self._items.begin(task.id)
        if self._output is not None:
            self._output.begin(task)

    def tokens(self, task: Task, delta: Delta) -> None:
        if self.is_plain:
            for text in delta.texts:
                if text:
                    self._items.say(text, [])
            return
        entries: Sequence[TokenLogprob | None] = delta.logprobs or [None] * len(delta.ids)
        for token_id, text, entry in zip(delta.ids, delta.texts, entries, strict=True):
            self._tokens += 1
            if entry is not None:
                self._logprobs += logprobs_of([token_id], [entry], self._token_of)
            if self._output is not None:
                self._add(self._output.feed_token(token_id, text))
            elif text:
                self._say(text)

    def ended(self, task: Task) -> None:
        ending = task.ending
        assert ending is not None
        self._items.begin(task.id)
        if ending.error is None:
            if self._output is not None:
                self._add(self._output.finish(ending.tail, ending))
            elif ending.tail:
                self._say(ending.tail)
            self._items.finish(status_of(ending), self._logprobs)
        else:
            self._items.stop()
        self._keep(task, self)
        self.complete.set()

    # for those that tell events

    def _tell(self, kind: str, fields: Mapping[str, object]) -> None:
        """Hear of an event; nobody does here."""

    def _begin(self, task: Task, *kinds: str) -> None:
        """Tell the events ``kinds``, with which a response begins, once."""
        if self._has_begun:
            return
        self._has_begun = True
        for kind in kinds:
            self._tell(kind, {"response": response(task, self.asked, "in_progress")})

    def _end(self, task: Task) -> None:
        """Take the task's end, and tell the last event."""
        ending = task.ending
        assert ending is not None
        OutputCollector.ended(self, task)
        status = status_of(ending)
        last = {"response": self.body(task) | {"deadline_budget": str(ending.budget)}}
        self._tell(status if status in ("completed", "incomplete") else "failed", last)

    # its current state

    def body(self, task: Task) -> dict[str, object]:
        """The response as it is now."""
        status = status_of(task.ending, has_started=task.stage >= Stage.RUNNING)
        output = [item.body() for item in self._items.items]
        return response(task, self.asked, status, output, reasoning_tokens=self._reasoning_tokens)

    def turns(self) -> tuple[Message, ...]:
        """The turns that this response adds to the conversation."""
        items = self._items.items
        content = "".join([item.text for item in items if item.kind is ItemKind.MESSAGE])
        calls = self._calls()
        if not (content or calls):
            return ()
        thoughts = [item.text for item in items if item.kind is ItemKind.REASONING] if calls else []
        return (Message("assistant", content, calls=calls, reasoning="".join(thoughts)),)

    def _calls(self) -> tuple[ToolCall, ...]:
        calls = []
        for item in self._items.items:
            if item.kind is not ItemKind.CALL or item.status != "completed":
                continue
            try:
                calls.append(read_call(item.call_id, item.name, item.text, "arguments"))
            except InvalidRequest:  # nested too deep for a template
                continue
        return tuple(calls)

    def _add(self, pieces: Sequence[Piece]) -> None:
        if any(isinstance(piece, Reasoning) for piece in pieces):
            self._reasoning_tokens = self._tokens
        self._logprobs = self._items.add(pieces, self._logprobs)

    def _say(self, text: str) -> None:
        logprobs, self._logprobs = self._logprobs, []
        self._items.say(text, logprobs)
