"""OpenAI's streamed chunks: one event per token, from parts that are built once per request.

Consecutive chunks differ only in their text. So everything around the text is encoded in advance,
and a token costs one JSON string and one join. If clients ask for more fields (log-probabilities,
token ids, the usage so far), each chunk is encoded separately.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from orchestrator.api.http.event_stream import EventStream
from orchestrator.api.http.outputs import TaskOutput
from orchestrator.api.http.responses import task_fields
from orchestrator.api.openai import echo
from orchestrator.api.openai.choices import Choices
from orchestrator.api.openai.shapes import (
    Deltas,
    Shape,
    error_body,
    stop_reason,
    stop_text,
    token_counts,
)
from orchestrator.parsing.pieces import Content, Reasoning
from orchestrator.prompts.encoder import PromptEncoder
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.task import Task
from protocol import Delta, TokenLogprob

_encode = msgspec.json.Encoder().encode
_PLACE = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Placeholder for the text in a chunk that is encoded in advance."""


class ChunkStream:
    """Turns one choice's tokens into chunks. ``stream`` sends the chunks of all choices."""

    def __init__(
        self,
        stream: EventStream,
        shape: Shape,
        choices: Choices,
        index: int,
        *,
        created: int,
        encoder_of: Callable[[], PromptEncoder],
    ) -> None:
        self._stream = stream
        self._shape = shape
        self._choices = choices
        self._index = index
        self._created = created
        self._encoder_of = encoder_of
        request = choices.request
        self._options = request.options
        self._own_chunks = (
            request.job.sampling.logprobs is not None
            or self._options.running_usage
            or self._options.token_ids
        )
        """Whether a token's chunk has more fields than its text."""
        self._before = b""
        self._after = b""
        self._text_offset = 0
        self._prompt_ids: Sequence[int] = ()

    # as a listener

    def started(self, task: Task) -> None:
        """Send nothing: before the first token, an error can still be an HTTP status."""
        if self._options.needs_prompt_ids:
            self._prompt_ids = list(task.token_ids)  # an ended task no longer has them

    def tokens(self, task: Task, delta: Delta) -> None:
        if not self._before:
            self._open(task)
        if self._own_chunks:
            self._send_own_chunks(task, delta)
        else:
            self._send_texts(task, delta)

    def _send_texts(self, task: Task, delta: Delta) -> None:
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
        is_over = self._choices.ended(task)
        more = {"deadline_budget": str(ending.budget), **task_fields(task)}
        if ending.error is not None:
            if not self._stream.refuse(ending.error):
                self._stream.finish(_event(error_body(ending.error) | more))
            return
        if not self._before:
            self._open(task)
        tail = ending.tail
        if self._options.stop_in_text:
            tail += stop_text(ending, self._encoder_of().tokens)
        choice = self._last(ending, tail) | {"stop_reason": stop_reason(ending)}
        last = _event(self._chunk(task, [choice], task.completion_tokens) | more)
        if not is_over:
            self._stream.send(last)
            return
        if self._options.usage:
            last += _event(self._chunk(task, []) | {"usage": self._choices.usage()})
        self._stream.finish(last + b"data: [DONE]\n\n")

    # inside

    def _open(self, task: Task) -> None:
        """Encode the common parts of all chunks. A chat begins with the role."""
        whole = _event(self._chunk(task, [self._shape.delta(self._index, _PLACE)]))
        self._before, _, self._after = whole.partition(_encode(_PLACE))
        ids = {"prompt_token_ids": self._prompt_ids} if self._options.token_ids else {}
        choice = self._shape.delta(self._index, None)
        if self._shape.is_chat:
            choice["delta"] = {"role": "assistant", "content": ""}
            self._stream.send(_event(self._chunk(task, [choice]) | ids))
        elif ids:
            self._stream.send(_event(self._chunk(task, [choice | ids])))
        if self._options.echo:
            self._send_echo(task)

    def _send_echo(self, task: Task) -> None:
        tokens, ids = self._encoder_of().tokens, self._prompt_ids
        text = echo.at_once(echo.text_of(self._choices.prompt_of(self._index), ids, tokens))
        logprobs: msgspec.Raw | None = None
        if (top := task.sampling.logprobs) is not None:
            turns = echo.echoed_logprobs(ids, task.prompt_logprobs, top, tokens, {})
            logprobs = echo.at_once(turns)  # their number is bounded
        self._text_offset = len(text)
        choice = self._shape.delta(self._index, text, logprobs)
        self._stream.send(_event(self._chunk(task, [choice])))

    def _last(self, ending: Ending, tail: str) -> dict[str, object]:
        return self._shape.delta(self._index, tail or None, None, ending.finish_reason.value)

    def _token(self, token_id: int, text: str, logprobs: object) -> dict[str, object]:
        return self._shape.delta(self._index, text, logprobs)

    def _send_own_chunks(self, task: Task, delta: Delta) -> None:
        events = []
        token_of = self._encoder_of().tokens.token
        made = task.completion_tokens - len(delta.ids)
        entries: Sequence[TokenLogprob | None] = delta.logprobs or [None] * len(delta.ids)
        for token_id, text, entry in zip(delta.ids, delta.texts, entries, strict=True):
            made += 1
            logprobs = None
            if entry is not None:
                logprobs = self._shape.logprobs(
                    [token_id], [text], [entry], token_of, self._text_offset
                )
            self._text_offset += len(text)
            choice = self._token(token_id, text, logprobs)
            if self._options.token_ids:
                choice["token_ids"] = [token_id]
            events.append(_event(self._chunk(task, [choice], made)))
        self._stream.send(b"".join(events))

    def _chunk(
        self, task: Task, choices: list[dict[str, object]], made: int = 0
    ) -> dict[str, object]:
        """A chunk with these choices. ``made``: tokens of its choice so far, with this chunk."""
        chunk = self._shape.head(self._choices.first or task, self._created, chunk=True)
        chunk["choices"] = choices
        chunk |= self._choices.told_tier()
        if self._options.running_usage:
            chunk["usage"] = token_counts(task.prompt_tokens, made)
        elif self._options.usage:
            chunk["usage"] = None
        return chunk


class ParsedChunkStream(ChunkStream):
    """Chunks of a chat in which the model may think in tags or call tools."""

    def __init__(self, output: TaskOutput, *args: Any, **kwargs: Any) -> None:
        """``args`` and ``kwargs`` are passed to ``ChunkStream``."""
        super().__init__(*args, **kwargs)
        self._output = output
        self._deltas = Deltas(self._choices.request.free_texts)
        self._around_reasoning: list[bytes] = []
        """Encoded parts of a chunk before, between and after the model's thinking."""

    def started(self, task: Task) -> None:
        super().started(task)
        self._output.begin(task)

    def _send_texts(self, task: Task, delta: Delta) -> None:
        pieces = self._output.feed(delta)
        if len(pieces) == 1:
            match pieces[0]:
                case Content(text):
                    self._stream.send(self._before + _encode(text) + self._after)
                    return
                case Reasoning(text):
                    if not self._around_reasoning:
                        said = self._deltas.of([Reasoning(_PLACE)])
                        self._around_reasoning = self._event_of(task, said).split(_encode(_PLACE))
                    self._stream.send(_encode(text).join(self._around_reasoning))
                    return
        if said := self._deltas.of(pieces):
            self._stream.send(self._event_of(task, said))

    def _event_of(self, task: Task, said: dict[str, object]) -> bytes:
        choice = self._shape.delta(self._index, None) | {"delta": said}
        return _event(self._chunk(task, [choice]))

    def _last(self, ending: Ending, tail: str) -> dict[str, object]:
        said = self._deltas.of(self._output.finish(tail, ending))
        reason = "tool_calls" if self._output.is_calling(ending) else ending.finish_reason.value
        return self._shape.delta(self._index, None, None, reason) | {"delta": said}

    def _token(self, token_id: int, text: str, logprobs: object) -> dict[str, object]:
        said = self._deltas.of(self._output.feed_token(token_id, text))
        return self._shape.delta(self._index, None, logprobs) | {"delta": said}


def _event(value: object) -> bytes:
    return b"data: %b\n\n" % _encode(value)
