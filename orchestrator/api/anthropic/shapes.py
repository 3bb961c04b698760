"""Anthropic's message, its usage and why it stopped."""

import uuid

import msgspec
import pydantic_core

from orchestrator.api.http.answer_ids import answer_id
from orchestrator.parsing import Call, Output
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.task import Task
from protocol import FinishReason

_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.DEADLINE: "deadline",
}
"""Why a message ended, in Anthropic's words. ``deadline`` is our own, and only sent to those who
ask for ``on_deadline``."""


def blocks_of(output: Output) -> list[object]:
    """The content blocks of a model's whole output."""
    blocks: list[object] = []
    if output.reasoning:
        blocks.append({"type": "thinking", "thinking": output.reasoning, "signature": ""})
    if output.content:
        blocks.append({"type": "text", "text": output.content})
    blocks += [
        {
            "type": "tool_use",
            "id": new_call_id(),
            "name": call.name,
            "input": _input(call),
        }
        for call in output.calls
    ]
    return blocks


def _input(call: Call) -> object:
    """The arguments of a call; of a call that was cut, as far as they go."""
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
    """A whole message; without an ``ending``, as it is when a stream begins."""
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
    """The fields that say why a message ended; ``is_calling`` if it ended with calls of tools."""
    if is_calling:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if ending is None:
        return {"stop_reason": None, "stop_sequence": None}
    if ending.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": ending.stop}
    reason = _STOP_REASONS.get(ending.finish_reason, ending.finish_reason.value)
    return {"stop_reason": reason, "stop_sequence": None}


def usage(task: Task) -> dict[str, int]:
    """Token counts. Each prompt token is in one of three fields. How many the prefix cache had is
    known at the end only; nothing is ever cached for a fee."""
    return {
        "input_tokens": task.prompt_tokens - task.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": task.cached_tokens,
        "output_tokens": task.completion_tokens,
    }
