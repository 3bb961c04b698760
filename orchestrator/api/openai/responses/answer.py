"""One response in the making: what has come of it, and how it stands."""

from collections.abc import Callable

from orchestrator.api.http.one_answer import WholeAnswer
from orchestrator.api.openai.responses.shapes import (
    logprobs_of,
    message_item,
    response,
    status_of,
    text_part,
)
from orchestrator.api.openai.responses.types import ParsedRequest
from orchestrator.api.openai.shapes import TokenOf
from orchestrator.tasks.job import Message
from orchestrator.tasks.task import Stage, Task


class Answer(WholeAnswer):
    """Hears its task. ``keep`` is called at the end of one that is to be stored."""

    def __init__(
        self, asked: ParsedRequest, token_of: TokenOf, keep: Callable[[Task, "Answer"], None]
    ) -> None:
        super().__init__()
        self.asked = asked
        self._token_of = token_of
        self._keep = keep

    def ended(self, task: Task) -> None:  # type: ignore[override]  # it hears tasks only
        if self.asked.is_stored:
            self._keep(task, self)
        super().ended(task)

    def body(self, task: Task) -> dict[str, object]:
        """The response as it stands."""
        status = status_of(task.ending, has_started=task.stage >= Stage.RUNNING)
        return response(task, self.asked, status, self._output(task))

    def turns(self, task: Task) -> tuple[Message, ...]:
        """What the conversation has more by it."""
        text = self._text(task)
        return (Message("assistant", text),) if text else ()

    def text_part(self, task: Task) -> dict[str, object]:
        """All text so far."""
        return text_part(self._text(task), self._logprobs())

    def message(self, task: Task) -> dict[str, object]:
        """All text so far, as an item of the output."""
        status = status_of(task.ending)
        item_status = status if status in ("in_progress", "completed") else "incomplete"
        return message_item(task, item_status, [self.text_part(task)])

    def _output(self, task: Task) -> list[object]:
        """An answer that has ended well has a text, be it an empty one."""
        ended_well = task.ending is not None and task.ending.error is None
        return [self.message(task)] if ended_well or self.texts else []

    def _text(self, task: Task) -> str:
        return self.text() + (task.ending.tail if task.ending is not None else "")

    def _logprobs(self) -> list[object]:
        return logprobs_of(self.ids, self.logprobs, self._token_of) if self.logprobs else []
