"""Anthropic's message, usage, stop reasons and errors
(https://docs.claude.com/en/api/errors).

Events of a streamed message::

    message_start  (content_block_start  [ping]  content_block_delta …  content_block_stop) …
    message_delta  message_stop

The text is one block. Thinking and each tool call are blocks too. ``ping`` follows the start of the
first block. Each event is sent with the first bytes that need it: before the first token, an error
can still be an HTTP status (DL-5). A later error is the event ``error``.
"""

import uuid
from collections.abc import Iterable

import msgspec
import pydantic_core

from orchestrator.api.http.context import Dialect
from orchestrator.api.http.event_stream import EventStream, event_of
from orchestrator.api.http.finding import answer_id
from orchestrator.api.http.outputs import TaskOutput
from orchestrator.api.http.responses import task_fields
from orchestrator.errors import InvalidRequest, RateLimited, TidegateError, Unavailable
from orchestrator.parsing.parser import Output, ParsedCall
from orchestrator.parsing.pieces import (
    CallArguments,
    CallBegins,
    CallEnds,
    CallFails,
    Content,
    Piece,
    Reasoning,
)
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.task import Task
from protocol import Code, Delta, FinishReason

_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.DEADLINE: "deadline",
}
"""Anthropic's names for the reason that a message ended. ``deadline`` (``on_deadline``) is ours."""


def blocks_of(output: Output) -> list[object]:
    """The content blocks of a model's whole output."""
    blocks: list[object] = []
    if output.reasoning:
        blocks.append({"type": "thinking", "thinking": output.reasoning, "signature": ""})
    if output.content:
        blocks.append({"type": "text", "text": output.content})
    blocks += [
        {"type": "tool_use", "id": new_call_id(), "name": call.name, "input": _input(call)}
        for call in output.calls
    ]
    return blocks


def _input(call: ParsedCall) -> object:
    """The arguments of a call. A truncated call has only the complete part."""
    if not call.is_cut:
        return msgspec.Raw(call.arguments.encode())
    try:
        begun = pydantic_core.from_json(call.arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        begun = None
    return begun if isinstance(begun, dict) else {"INVALID_JSON": call.arguments}


def new_call_id() -> str:
    return f"toolu_{uuid.uuid4().hex[:24]}"


def message(
    task: Task, ending: Ending | None, content: list[object], *, is_calling: bool = False
) -> dict[str, object]:
    """A whole message. Without an ``ending``, it is the message at the start of a stream."""
    return {
        "id": answer_id(task),
        "type": "message",
        "role": "assistant",
        "model": task.served_name,
        "content": content,
        **stop(ending, is_calling=is_calling),
        "usage": usage(task),
    }


def stop(ending: Ending | None, *, is_calling: bool = False) -> dict[str, str | None]:
    """The fields with the reason that a message ended; ``is_calling`` if it ended in tool calls."""
    reason = sequence = None
    if is_calling:
        reason = "tool_use"
    elif ending is not None and ending.stop:
        reason, sequence = "stop_sequence", ending.stop
    elif ending is not None:
        reason = _STOP_REASONS.get(ending.finish_reason, ending.finish_reason.value)
    return {"stop_reason": reason, "stop_sequence": sequence}


def usage(task: Task) -> dict[str, int]:
    """Token counts. Each prompt token counts in exactly one of three fields. The worker reports its
    cached tokens with the first token. Caching has no fee."""
    told = min(task.likely_cached, task.prompt_tokens)
    cached = told if task.ending is None else task.cached_tokens
    return {
        "input_tokens": task.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": task.completion_tokens,
    }


OVERLOADED = 529
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


class ThreadUnsupported(InvalidRequest):
    """The request continues a thread; threads are not kept here. After this error, Claude Code
    sends the whole conversation, and no threads for the rest of its session."""


def status_of(error: TidegateError) -> int:
    """HTTP status of an error: the same as in every dialect, except for 529. It means that a later
    request or another server could succeed."""
    if isinstance(error, Unavailable) and not isinstance(error, RateLimited):
        return OVERLOADED
    return error.status


def error_body(error: TidegateError, request_id: str) -> dict[str, object]:
    """An error as Anthropic's JSON object, with our ``code`` and its figures added."""
    status = status_of(error)
    other = "invalid_request_error" if status < 499 else "api_error"
    told: dict[str, object] = {
        "type": _TYPES.get(status, other),
        "message": f"{_overflow(error)}{error.message}",
        "code": error.code.value,
        **error.details,
    }
    if isinstance(error, ThreadUnsupported):
        told["details"] = {"error_code": "thread_unsupported_request"}
    return {"type": "error", "error": told, "request_id": request_id}


def _overflow(error: TidegateError) -> str:
    """Anthropic's error prefix for a prompt that does not fit. Agents search for these words and
    numbers, and shorten the conversation accordingly."""
    if error.code is not Code.CONTEXT_OVERFLOW or error.field not in ("prompt", "messages"):
        return ""
    told, figures = error.details, ""
    if "prompt_tokens" in told:
        figures = f"{told['prompt_tokens']} tokens > {told['context_tokens']} maximum; "
    return f"prompt is too long: {figures}"


ANTHROPIC = Dialect(
    "/v1/messages", error_body, status_of, request_id_header="request-id", is_tolerant=True
)


class MessageEvents:
    """Turns one task's tokens, parsed by ``output``, into events that ``stream`` sends."""

    def __init__(self, stream: EventStream, request_id: str, output: TaskOutput) -> None:
        self._stream = stream
        self._request_id = request_id
        self._output = output
        self._events: list[bytes] = []
        """Encoded events that are sent together."""
        self._has_message = False
        self._index = -1
        self._open = ""
        """Type of the open block; empty between blocks."""

    # as a listener

    def started(self, task: Task) -> None:
        """Send nothing: before the first token, an error can still be an HTTP status."""
        self._output.begin(task)

    def tokens(self, task: Task, delta: Delta) -> None:
        self._begin(task)
        if self._output.is_plain:  # an event for each token
            self._add([Content(text) for text in delta.texts if text])
        else:
            self._add(self._output.feed(delta))
        self._stream.send(self._take())

    def ended(self, task: Task) -> None:
        ending = task.ending
        assert ending is not None
        more = {"deadline_budget": str(ending.budget), **task_fields(task)}
        if ending.error is not None:
            if not self._stream.refuse(ending.error):
                self._emit("error", error_body(ending.error, self._request_id) | more)
                self._stream.finish(self._take())
            return
        self._begin(task)
        self._add(self._output.finish(ending.tail, ending))
        self._close()
        delta = stop(ending, is_calling=self._output.is_calling(ending))
        self._emit("message_delta", {"delta": delta, "usage": usage(task), **more})
        self._emit("message_stop", {})
        self._stream.finish(self._take())

    # inside

    def _begin(self, task: Task) -> None:
        """Emit the event that must come first, once."""
        if not self._has_message:
            self._has_message = True
            self._emit("message_start", {"message": message(task, None, [])})

    def _add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            match piece:
                case Content(text):
                    self._in_block("text", {"text": ""})
                    self._delta("text_delta", "text", text)
                case Reasoning(text):
                    self._in_block("thinking", {"thinking": "", "signature": ""})
                    self._delta("thinking_delta", "thinking", text)
                case CallBegins(_, name):
                    self._close()
                    self._in_block("tool_use", {"id": new_call_id(), "name": name, "input": {}})
                    self._delta("input_json_delta", "partial_json", "")
                case CallArguments(_, json):
                    self._delta("input_json_delta", "partial_json", json)
                case CallEnds():
                    self._close()
                case CallFails(_, text, is_cut):
                    self._close()
                    if not is_cut:  # the client cannot use a partial call
                        self._add([Content(text)])

    def _in_block(self, kind: str, start: dict[str, object]) -> None:
        """Open a block of type ``kind``, unless one is open already."""
        if self._open == kind:
            return
        self._close()
        self._index += 1
        self._open = kind
        block = {"type": kind, **start}
        self._emit("content_block_start", {"index": self._index, "content_block": block})
        if self._index == 0:
            self._emit("ping", {})

    def _close(self) -> None:
        if self._open == "thinking":  # where Anthropic has one; nothing here needs it
            self._delta("signature_delta", "signature", "")
        if self._open:
            self._open = ""
            self._emit("content_block_stop", {"index": self._index})

    def _delta(self, kind: str, key: str, text: str) -> None:
        delta = {"type": kind, key: text}
        self._emit("content_block_delta", {"index": self._index, "delta": delta})

    def _emit(self, kind: str, value: dict[str, object]) -> None:
        self._events.append(event_of(kind, {"type": kind} | value))

    def _take(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events
