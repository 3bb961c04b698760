"""The items of a conversation in the Responses API.

Clients send back items of earlier answers with all of the SDK's fields. Only the fields here are
read.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec
from msgspec import structs

from orchestrator.api.http.decode import Reader, decode_part
from orchestrator.api.http.field_errors import missing, wrong
from orchestrator.api.http.fields import NULL, Unused
from orchestrator.api.http.ignored import pass_over
from orchestrator.api.http.images import shown_by_users
from orchestrator.api.http.tools import read_call
from orchestrator.api.openai.chats import Content, said_in, thoughts_in
from orchestrator.api.openai.responses.tools import known_as
from orchestrator.api.openai.tools import INPUT
from orchestrator.tasks.job import Message, ToolCall
from protocol import excerpt

_BETWEEN_INSTRUCTIONS = "\n\n"
_WITHOUT_CONTENT = (
    "code_interpreter_call",
    "file_search_call",
    "image_generation_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "mcp_list_tools",
    "program",
    "program_output",
    "tool_search_call",
    "tool_search_output",
    "web_search_call",
)
"""Items about tools that another service's server ran. The message after them has the result."""
_content_reader: Reader[Content] = Reader(Content)
Role = Literal["system", "developer", "user", "assistant"]
_OF_CALLS = ("function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output")
_SERVED = ", ".join(("message", *_OF_CALLS, "reasoning", "item_reference"))


class InputItem(msgspec.Struct, frozen=True, gc=False):
    """One item of any type. A message may lack its ``type``. A body may have so many items that
    garbage collection would dominate."""

    type: str | None = None
    id: str | None = None
    role: Role | None = None
    content: Content = None
    call_id: str | None = None
    name: str = ""
    namespace: str | None = None
    arguments: msgspec.Raw = NULL
    input: str = ""
    output: msgspec.Raw = NULL
    status: Unused = NULL
    phase: Unused = NULL
    summary: Unused = NULL
    encrypted_content: Unused = NULL


class Reference(NamedTuple):
    """An item of an earlier answer, by its id."""

    item_id: str

    @property
    def task_id(self) -> str:
        """Id of the answer's task. Item ids contain it."""
        parts = self.item_id.split("_")
        return parts[1] if len(parts) > 1 else ""


class Turns:
    """The turns that a request adds to a conversation. A model's message and the tool calls after
    it are one turn. The flags save the event loop a search of up to 100,000 turns."""

    def __init__(self) -> None:
        self.turns: list[Message | Reference] = []
        self.has_references = False
        self.has_orphans = False
        """Whether there are results of tool calls from before this request."""
        self._called: dict[str, str] = {}
        """Names of the calls so far, by id."""
        self._calls: list[ToolCall] = []
        """Calls of the current turn."""
        self._thought = ""

    @classmethod
    def of(cls, stated: str | Sequence[InputItem]) -> "Turns":
        """The turns of a request's ``input``. Raises ``InvalidRequest`` for unsupported items."""
        read = cls()
        if isinstance(stated, str):
            read.turns.append(Message("user", stated))
            return read
        for at, item in enumerate(stated):
            read._read(item, f"input[{at}]")
        read._end_calls()
        return read

    def _read(self, item: InputItem, where: str) -> None:
        kind, call_id = item.type or "message", item.call_id or ""
        if kind in _OF_CALLS and not call_id:
            raise missing(f"{where}.call_id", "send the same one in a call and its result")
        if kind in ("function_call", "custom_tool_call"):
            name = self._called[call_id] = known_as(item.name, item.namespace)
            if kind == "custom_tool_call":
                size = len(name) + len(item.input)
                call = ToolCall(call_id, name, {INPUT: item.input}, size)
            else:
                call = read_call(call_id, name, item.arguments, f"{where}.arguments")
            self._calls.append(call)
            return
        self._end_calls()
        match kind:
            case "message" if item.type or item.role or not item.id:
                if item.role is None:
                    raise missing(f"{where}.role")
                self.turns.append(said_in(item.role, item.content, f"{where}.content"))
            case "function_call_output" | "custom_tool_call_output":
                self._result(item.output, call_id, f"{where}.output")
            case "reasoning":
                # Omitted, like earlier turns' thinking in templates, unless the turn called tools.
                self._thought = thoughts_in(item.content)
                return
            case "item_reference" | "message":  # a reference may lack its type
                self.has_references = True
                self.turns.append(Reference(item.id or ""))
            case _:
                _pass_over(excerpt(kind, 64), f"{where}.type")
        if item.role != "assistant":
            self._thought = ""

    def _end_calls(self) -> None:
        """Attach the calls so far to the model's message before them, if there is one."""
        if not self._calls:
            return
        calls, self._calls = tuple(self._calls), []
        last = self.turns[-1] if self.turns else None
        if isinstance(last, Message) and last.role == "assistant":
            said = structs.replace(last, calls=(*last.calls, *calls))
            self.turns[-1] = structs.replace(said, reasoning=last.reasoning or self._thought)
        else:
            self.turns.append(Message("assistant", "", calls=calls, reasoning=self._thought))

    def _result(self, output: msgspec.Raw, call_id: str, where: str) -> None:
        name = self._called.get(call_id, "")
        self.has_orphans = self.has_orphans or not name
        content = decode_part(output, _content_reader, where, "input[].output")
        said = said_in("tool", content or "", where)
        self.turns.append(structs.replace(said, call_id=call_id, name=name))


def _pass_over(kind: str, where: str) -> None:
    refusal = wrong(
        where,
        f"{kind} is not supported; send a call of your own tool as function_call, and its result "
        f"as function_call_output; expected one of: {_SERVED}",
    )
    if kind not in _WITHOUT_CONTENT:
        raise refusal
    pass_over("input[]", f"type={kind}", refusal)


def joined(
    earlier: tuple[Message, ...], new: Turns, answer_of: Callable[[str], Message | None]
) -> tuple[Message, ...]:
    """A conversation with its new turns. References are resolved; results get their tools' names.
    ``answer_of`` finds a task's answer. Raises ``InvalidRequest`` if an answer is not kept."""
    turns = _resolved(new.turns, answer_of) if new.has_references else new.turns
    history = (*earlier, *turns)
    return _with_names(history) if new.has_orphans else history


def conversation(instructions: str | None, history: Sequence[Message]) -> tuple[Message, ...]:
    """The model's whole input. Consecutive instructions at the start are merged into one message,
    because many chat templates accept only one."""
    first = next((at for at, m in enumerate(history) if m.role != "system"), len(history))
    texts = [message.content for message in history[:first]]
    if instructions:
        texts.insert(0, instructions)
    shown = shown_by_users(history[first:])
    return (Message("system", _BETWEEN_INSTRUCTIONS.join(texts)), *shown) if texts else shown


def _resolved(
    turns: Iterable[Message | Reference], answer_of: Callable[[str], Message | None]
) -> tuple[Message, ...]:
    """Turns with each reference replaced by the whole turn of its item. Each turn occurs once."""
    messages: list[Message] = []
    seen = set()
    for turn in turns:
        if isinstance(turn, Message):
            messages.append(turn)
        elif turn.task_id not in seen:
            seen.add(turn.task_id)
            answer = answer_of(turn.task_id)
            if answer is None:
                quoted = f"{excerpt(turn.item_id, 64)!r}"
                error = wrong("input", f"item {quoted} is not kept here; send the item")
                error.item_id = turn.task_id
                raise error
            messages.append(answer)
    return tuple(messages)


def _with_names(history: Sequence[Message]) -> tuple[Message, ...]:
    called = {call.id: call.name for message in history for call in message.calls}
    return tuple(
        structs.replace(message, name=called.get(message.call_id, ""))
        if message.role == "tool" and not message.name
        else message
        for message in history
    )
