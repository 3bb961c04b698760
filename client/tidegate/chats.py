"""Chats in OpenAI's shape: tools, reasoning apart from the answer, structured output.

Deadlines and retries work as they do for tasks. An interrupted chat is not resumed. For text
alone, use ``Client.stream``, which resumes.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec

from tidegate.deadlines import due, to_seconds, told
from tidegate.errors import ConnectFailed, ProtocolError, TidegateError, error_class
from tidegate.requests import CommonOptions, wire_options
from tidegate.results import Usage
from tidegate.sse import SseParser, received
from tidegate.transport import LONGEST_TASK_S, HttpCall, Transport

_PATH = "/v1/chat/completions"
_DONE = "[DONE]"

ChatMessage = Mapping[str, Any]
"""A turn in OpenAI's shape: ``role``, ``content``, ``tool_calls``, ``tool_call_id``."""


class ChatOptions(CommonOptions, total=False):
    """Options of a chat other than its messages, with OpenAI's names and Tidegate's.

    ``extra_body`` holds any other fields that the service accepts.
    """

    max_completion_tokens: int
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    chat_template_kwargs: Mapping[str, Any]
    extra_body: Mapping[str, Any]


class ToolCall(msgspec.Struct, frozen=True):
    """A function that the model asks to call; ``arguments`` is JSON."""

    id: str
    name: str
    arguments: str


class ChatAnswer(msgspec.Struct, frozen=True):
    """A complete answer. ``reasoning`` is the model's reasoning before it, or empty."""

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str | None
    usage: Usage | None


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A piece of a tool call; the first piece of each ``index`` has its id and name."""

    index: int
    id: str
    name: str
    arguments: str


class ChatDelta(msgspec.Struct, frozen=True):
    """A new piece of an answer. ``finish_reason`` and ``usage`` come last."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None


# ── as it is on the wire ─────────────────────────────────────────────────────────────────────────


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    id: str | None = None
    index: int = 0
    function: _Function = msgspec.field(default_factory=_Function)

    @property
    def told(self) -> tuple[str, str, str]:
        """Id, name and arguments."""
        return self.id or "", self.function.name or "", self.function.arguments or ""


class _Said(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None

    @property
    def texts(self) -> tuple[str, str]:
        """The answer and its reasoning."""
        return self.content or "", self.reasoning or self.reasoning_content or ""


class _Choice(msgspec.Struct):
    message: _Said = msgspec.field(default_factory=_Said)
    delta: _Said = msgspec.field(default_factory=_Said)
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: str | None = None
    retryable: bool = False


class _Completion(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: _Error | None = None


def chat_call(
    model: str, messages: Sequence[ChatMessage], options: ChatOptions, *, is_streamed: bool
) -> HttpCall:
    """Build the request of a chat; its deadline starts now. Raises ``DeadlineExceeded``."""
    deadline = due(options.get("deadline"))
    body: dict[str, Any] = {**told.get(), "model": model, **options, "messages": list(messages)}
    body |= body.pop("extra_body", {})
    if body.get("deadline") is not None:
        body["deadline_ms"] = 1000 * to_seconds(body["deadline"])
    body = wire_options(body, deadline)  # it counts, whatever ``extra_body`` states
    if is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    # Not idempotent: a retry would compute an answer again if only its response was lost.
    return HttpCall(
        "POST",
        _PATH,
        body=body,
        is_idempotent=False,
        ends_at=deadline.at,
        patience_s=LONGEST_TASK_S,
    )


async def whole(transport: Transport, call: HttpCall) -> ChatAnswer:
    """Send ``call`` and wait for the whole answer. Raises ``TidegateError``."""
    completion = await transport.call(call, _Completion)
    if not completion.choices:
        raise ProtocolError(f"{_PATH} answered without a choice")
    choice = completion.choices[0]
    calls = tuple(ToolCall(*call.told) for call in choice.message.tool_calls or ())
    return ChatAnswer(*choice.message.texts, calls, choice.finish_reason, completion.usage)


async def deltas(
    transport: Transport, call: HttpCall
) -> AsyncGenerator[tuple[ChatDelta, str], None]:
    """Send ``call`` and yield its answer as it grows, as items of a ``Stream``, without ids.
    Closing the generator ends the work."""
    attempt, has_begun = 0, False
    while True:
        try:
            async with transport.open(call) as response:
                has_begun = True
                async for event in received(response.content.iter_any(), SseParser()):
                    if event.data == _DONE:
                        return
                    if (delta := _delta(event.data)) != ChatDelta():  # the first has only the role
                        yield delta, ""
                raise ConnectFailed("the answer ended early", is_sent=True)
        except TidegateError as error:
            if not has_begun:
                await transport.pause(call, attempt, error)
            elif isinstance(error, ConnectFailed):
                raise ConnectFailed("the answer ended early", is_sent=True) from error
            else:
                raise
        attempt += 1


def _delta(data: str) -> ChatDelta:
    try:
        completion = msgspec.json.decode(data, type=_Completion)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a chunk has an unexpected body: {error}") from error
    if (failed := completion.error) is not None:
        code = failed.code or "internal"
        raise error_class(code, None)(failed.message, code=code, retryable=failed.retryable)
    if not completion.choices:
        return ChatDelta(usage=completion.usage)
    choice = completion.choices[0]
    calls = tuple(ToolCallDelta(call.index, *call.told) for call in choice.delta.tool_calls or ())
    return ChatDelta(*choice.delta.texts, calls, choice.finish_reason, completion.usage)
