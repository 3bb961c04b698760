"""Anthropic's message, its usage and why it stopped; errors as Anthropic spells them
(https://docs.claude.com/en/api/errors)."""

import uuid

import msgspec
import pydantic_core

from orchestrator.api.http.context import Dialect
from orchestrator.api.http.finding import answer_id
from orchestrator.errors import InvalidRequest, RateLimited, TidegateError, Unavailable
from orchestrator.parsing import Output, ParsedCall
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.task import Task
from protocol import Code, FinishReason

_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.DEADLINE: "deadline",
}
"""Why a message ended, in Anthropic's words. ``deadline`` is our own, and only sent with
``on_deadline``."""


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
    """Token counts. Each prompt token is in one of three fields. From the first token on the worker
    has reported its prefix cache's part; caching costs no fee."""
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
    """The conversation continues in a thread that was never kept. Claude Code then sends all of it,
    and no threads for the rest of its session."""


def status_of(error: TidegateError) -> int:
    """HTTP status of an error: the one of every dialect, except that 529 means that another time or
    place could serve it."""
    if isinstance(error, Unavailable) and not isinstance(error, RateLimited):
        return OVERLOADED
    return error.status


def error_body(error: TidegateError, request_id: str) -> dict[str, object]:
    """An error as Anthropic's JSON object, with our ``code`` and its figures added."""
    status = status_of(error)
    other = "invalid_request_error" if status < 499 else "api_error"
    message = f"{_overflow(error)}{error.message}"
    details: dict[str, object] = dict(error.details)
    if isinstance(error, ThreadUnsupported):
        details["details"] = {"error_code": "thread_unsupported_request"}
    return {
        "type": "error",
        "error": {
            "type": _TYPES.get(status, other),
            "message": message,
            "code": error.code.value,
            **details,
        },
        "request_id": request_id,
    }


def _overflow(error: TidegateError) -> str:
    """Anthropic's own prefix for a prompt that does not fit. Agents look for these words and
    figures, and shorten the conversation by them."""
    if error.code is not Code.CONTEXT_OVERFLOW or error.field not in ("prompt", "messages"):
        return ""
    told, figures = error.details, ""
    if "prompt_tokens" in told:
        figures = f"{told['prompt_tokens']} tokens > {told['context_tokens']} maximum; "
    return f"prompt is too long: {figures}"


ANTHROPIC = Dialect(
    "/v1/messages", error_body, status_of, request_id_header="request-id", is_tolerant=True
)
