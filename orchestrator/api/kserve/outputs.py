"""An answer as the plain contract's outputs, by name: a whole text, or an event for each piece
(``generate_stream``). Errors are Triton's: one string, ``code: message`` as on its own ports."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from orchestrator.api.http.context import Dialect
from orchestrator.api.http.event_stream import EventStream
from orchestrator.api.http.responses import task_fields
from orchestrator.api.kserve.metadata import MODEL_VERSION
from orchestrator.api.kserve.types import GenerateRequest
from orchestrator.errors import TidegateError
from orchestrator.prompts.encoder import PromptEncoder
from orchestrator.tasks.task import Task
from protocol import Delta, TokenLogprob
from protocol import tensors as names

NOT_FINISHED = "None"
"""``finish_reason`` of a piece that is not the last, as in vLLM's backend."""


@dataclass(slots=True)
class Outputs:
    """Renders the outputs that a request asked for, for each piece of its answer."""

    request: GenerateRequest
    encoder: PromptEncoder
    states_logprobs: bool
    _cumulative: float = field(default=0.0, init=False)

    def piece(
        self,
        task: Task,
        text: str,
        ids: Sequence[int],
        logprobs: Sequence[TokenLogprob],
        finish_reason: str = NOT_FINISHED,
    ) -> dict[str, object]:
        asked = self.request
        self._cumulative += sum(entry.logprob for entry in logprobs)
        outputs: dict[str, object] = {names.TEXT_OUTPUT: text}
        if asked.return_finish_reason:
            outputs[names.FINISH_REASON] = finish_reason
        if asked.return_cumulative_logprob:
            outputs[names.CUMULATIVE_LOGPROB] = self._cumulative
        if asked.return_logprobs:
            described = [self._described(*pair) for pair in zip(ids, logprobs, strict=False)]
            outputs[names.LOGPROBS] = json.dumps(described if self.states_logprobs else None)
        if asked.return_num_input_tokens:
            outputs[names.NUM_INPUT_TOKENS] = task.prompt_tokens
        if asked.return_num_output_tokens:
            outputs[names.NUM_OUTPUT_TOKENS] = len(ids)
        return outputs

    def head(self, task: Task) -> dict[str, object]:
        head: dict[str, object] = {"model_name": task.served_name, "model_version": MODEL_VERSION}
        return head | {"id": self.request.id} if self.request.id else head

    def _described(self, token_id: int, entry: TokenLogprob) -> dict[str, dict[str, object]]:
        """A token's log-probability in vLLM's form: the chosen token first, others by rank."""
        ranked = {token_id: (entry.logprob, entry.rank)}
        for rank, (top_id, logprob) in enumerate(entry.top, start=1):
            ranked[top_id] = logprob, rank
        return {
            str(one): {
                "logprob": logprob,
                "rank": rank,
                "decoded_token": self.encoder.tokens.token_text(one),
            }
            for one, (logprob, rank) in ranked.items()
        }


_encode = msgspec.json.Encoder().encode


class PieceEvents:
    """Turns one task's tokens into events. Listens to the task; ``stream`` sends the events."""

    def __init__(self, stream: EventStream, outputs: Outputs) -> None:
        self._stream = stream
        self._outputs = outputs

    def started(self, task: Task) -> None:
        """Send nothing: until the first token's byte an error can still be a status."""

    def tokens(self, task: Task, delta: Delta) -> None:
        piece = self._outputs.piece(task, "".join(delta.texts), delta.ids, delta.logprobs or ())
        self._stream.send(_event(self._outputs.head(task) | piece))

    def ended(self, task: Task) -> None:
        ending = task.ending
        assert ending is not None
        more = {"deadline_budget": str(ending.budget), **task_fields(task)}
        if ending.error is not None:
            if not self._stream.refuse(ending.error):
                self._stream.finish(_event(error_body(ending.error) | more))
            return
        piece = self._outputs.piece(task, ending.tail, (), (), ending.finish_reason.value)
        self._stream.finish(_event(self._outputs.head(task) | piece | more))


def _event(value: object) -> bytes:
    return b"data: %b\n\n" % _encode(value)


def error_body(error: TidegateError, request_id: str = "") -> dict[str, str]:
    return {"error": f"{error.code}: {error.message}"}


KSERVE = (Dialect("/v2/models", error_body, is_tolerant=True), Dialect("/v2/health", error_body))
