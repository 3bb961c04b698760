"""OpenAI's response object, its items and its usage."""

from collections.abc import Sequence

import msgspec

from orchestrator.api.http.answer_ids import ID_PREFIXES
from orchestrator.api.http.responses import task_fields
from orchestrator.api.openai.errors import error_body
from orchestrator.api.openai.responses.types import ParsedResponses
from orchestrator.api.openai.shapes import CHAT, TokenOf
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.job import Api
from orchestrator.tasks.task import Task
from protocol import AbortCause, FinishReason, TokenLogprob

_INCOMPLETE = {FinishReason.LENGTH: "max_output_tokens", FinishReason.DEADLINE: "deadline"}
"""Why a response is incomplete, in OpenAI's words. ``deadline`` is our own, and only sent to those
who ask for ``on_deadline``."""

_encode = msgspec.json.Encoder().encode


def response_id(task_id: str) -> str:
    return ID_PREFIXES[Api.RESPONSES] + task_id


def response(
    task: Task,
    asked: ParsedResponses,
    status: str,
    output: Sequence[object] = (),
    *,
    reasoning_tokens: int = 0,
) -> dict[str, object]:
    """A whole response in its current state, with its outcome once the task has ended."""
    ending = task.ending
    error = ending.error if ending is not None else None
    reason = _INCOMPLETE.get(ending.finish_reason) if status == "incomplete" and ending else None
    took_s = task.marks.ended - task.marks.received
    return {
        "id": response_id(task.id),
        "object": "response",
        "created_at": asked.created_unix,
        "status": status,
        "completed_at": asked.created_unix + round(took_s) if status == "completed" else None,
        "error": None if error is None else error_body(error)["error"],
        "incomplete_details": None if reason is None else {"reason": reason},
        "model": task.served_name,
        "output": output,
        "usage": None if ending is None else usage(task, reasoning_tokens),
        "temperature": task.sampling.temperature,
        "top_p": task.sampling.top_p,
        **asked.echo,
        **task_fields(task),
    }


def status_of(ending: Ending | None, *, has_started: bool = True) -> str:
    """OpenAI's word for the state of a response."""
    if ending is None:
        return "in_progress" if has_started else "queued"
    if ending.error is not None:
        return "cancelled" if ending.cause is AbortCause.CANCEL else "failed"
    return "incomplete" if ending.finish_reason in _INCOMPLETE else "completed"


def logprobs_of(
    ids: Sequence[int], entries: Sequence[TokenLogprob], token_of: TokenOf
) -> list[object]:
    """Log-probabilities in a chat's form, already encoded: an answer has thousands, and is encoded
    as a whole."""
    content = CHAT.logprobs(ids, (), entries, token_of)["content"]
    assert isinstance(content, list)
    return [msgspec.Raw(_encode(entry)) for entry in content]


def usage(task: Task, reasoning_tokens: int) -> dict[str, object]:
    return {
        "input_tokens": task.prompt_tokens,
        "input_tokens_details": {"cached_tokens": task.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": task.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": task.prompt_tokens + task.completion_tokens,
    }
