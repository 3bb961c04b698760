"""OpenAI's streamed chunks: one event per token, from parts that are built once per request.

A chunk differs from the next in its text only, so everything around the text is encoded ahead and
a token costs one JSON string and one join.
"""

import msgspec

from orchestrator.api.http.event_stream import EventStream
from orchestrator.api.http.responses import task_fields
from orchestrator.api.openai.errors import error_body
from orchestrator.api.openai.shapes import Shape, TokenOf, usage
from orchestrator.tasks.task import Task
from worker.protocol import Delta

_encode = msgspec.json.Encoder().encode
_PLACE = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for the text in a chunk that is encoded ahead."""


class ChunkStream:
    """Turns one task's tokens into chunks. Hears the task; ``stream`` carries them away."""

    def __init__(
        self,
        stream: EventStream,
        shape: Shape,
        *,
        created: int,
        token_of: TokenOf,
        with_usage: bool,
    ) -> None:
        self._stream = stream
        self._shape = shape
        self._created = created
        self._token_of = token_of
        self._with_usage = with_usage
        self._before = b""
        self._after = b""
        self._text_offset = 0

    # as a listener

    def started(self, task: Task) -> None:
        """Nothing to send: the first byte is the first token's, so that errors stay a status."""

    def tokens(self, task: Task, delta: Delta) -> None:
        if not self._before:
            self._open(task)
        if delta.logprobs is not None:
            self._send_with_logprobs(task, delta)
            return
        texts = delta.texts
        if len(texts) == 1:
            self._stream.send(self._before + _encode(texts[0]) + self._after)
        elif texts:
            between = self._after + self._before
            joined = between.join([_encode(text) for text in texts])
            self._stream.send(self._before + joined + self._after)

    def ended(self, task: Task) -> None:
        ending = task.ending
        assert ending is not None
        if ending.error is not None:
            if not self._stream.refuse(ending.error):
                self._stream.finish(
                    _event(
                        {
                            **error_body(ending.error),
                            "deadline_budget": str(ending.budget),
                            **task_fields(task),
                        }
                    )
                )
            return
        if not self._before:
            self._open(task)
        last = self._chunk(
            task, [self._shape.delta(ending.tail or None, None, ending.finish_reason.value)]
        )
        last |= {"deadline_budget": str(ending.budget), **task_fields(task)}
        events = [_event(last)]
        if self._with_usage:
            events.append(_event({**self._chunk(task, []), "usage": usage(task)}))
        events.append(b"data: [DONE]\n\n")
        self._stream.finish(b"".join(events))

    # inside

    def _open(self, task: Task) -> None:
        """Encode what every chunk has in common; a chat begins with the speaker's role."""
        whole = _event(self._chunk(task, [self._shape.delta(_PLACE)]))
        self._before, _, self._after = whole.partition(_encode(_PLACE))
        if self._shape.is_chat:
            choice = self._shape.delta(None)
            choice["delta"] = {"role": "assistant", "content": ""}
            self._stream.send(_event(self._chunk(task, [choice])))

    def _send_with_logprobs(self, task: Task, delta: Delta) -> None:
        events = []
        for token_id, text, entry in zip(delta.ids, delta.texts, delta.logprobs or (), strict=True):
            logprobs = self._shape.logprobs(
                [token_id], [text], [entry], self._token_of, self._text_offset
            )
            self._text_offset += len(text)
            events.append(_event(self._chunk(task, [self._shape.delta(text, logprobs)])))
        self._stream.send(b"".join(events))

    def _chunk(self, task: Task, choices: list[dict[str, object]]) -> dict[str, object]:
        chunk = self._shape.head(task, self._created, chunk=True)
        chunk["choices"] = choices
        if self._with_usage:
            chunk["usage"] = None
        return chunk


def _event(value: object) -> bytes:
    return b"data: %b\n\n" % _encode(value)
