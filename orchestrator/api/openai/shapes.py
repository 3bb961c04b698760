"""OpenAI's response formats for both kinds of completion.

The two kinds differ in names, and in the fields of a choice for text and log-probabilities. A
``Shape`` has these differences, so that streams and whole answers share their code. Errors follow
https://platform.openai.com/docs/guides/error-codes.
"""

import asyncio
import uuid
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

import msgspec

from orchestrator.api.http.context import Dialect
from orchestrator.api.http.finding import ID_PREFIXES
from orchestrator.api.openai.tools import INPUT, free_text
from orchestrator.errors import TidegateError
from orchestrator.parsing.parser import Output
from orchestrator.parsing.pieces import (
    CallArguments,
    CallBegins,
    CallEnds,
    CallFails,
    Content,
    Piece,
    Reasoning,
)
from orchestrator.prompts.tokens import SpelledToken, VocabularyTexts
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.job import Api
from orchestrator.tasks.task import Task
from protocol import Code, TokenLogprob

_TOKENS_AT_ONCE = 64
"""Tokens that are encoded at a time. With 20 alternatives each they take 1 or 2 ms."""
_LARGE = ("content", "top_logprobs")

_encode = msgspec.json.Encoder().encode

TokenOf = Callable[[int], SpelledToken]
"""Returns the text of a token id."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of completion: its names and whether it is a chat."""

    id_prefix: str
    object_name: str
    chunk_name: str
    is_chat: bool

    def head(self, task: Task, created: int, *, chunk: bool) -> dict[str, object]:
        """The fields before ``choices``. ``task`` is the first choice's task."""
        return {
            "id": self.id_prefix + task.id,
            "object": self.chunk_name if chunk else self.object_name,
            "created": created,
            "model": task.served_name,
        }

    def delta(
        self,
        index: int,
        text: str | None,
        logprobs: object = None,
        finish_reason: str | None = None,
    ) -> dict[str, object]:
        """A choice of a chunk or of a whole completion. ``text`` None adds no text."""
        content: dict[str, object] = {"text": text or ""}
        if self.is_chat:
            content = {"delta": {} if text is None else {"content": text}}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}

    def message(
        self, index: int, output: Output, logprobs: object, finish_reason: str, free_texts: Set[str]
    ) -> dict[str, object]:
        """A choice of a whole chat answer, from parsed output."""
        message: dict[str, object] = {
            "role": "assistant",
            "content": output.content or (None if output.calls else ""),
            "refusal": None,
        }
        if output.reasoning:
            message |= _reasoning(output.reasoning)
        if output.calls:
            message["tool_calls"] = [
                {"id": new_call_id()} | _call(call.arguments, call.name, call.name in free_texts)
                for call in output.calls
            ]
        choice = {"index": index, "message": message}
        return {**choice, "logprobs": logprobs, "finish_reason": finish_reason}

    def logprobs(
        self,
        ids: Sequence[int],
        texts: Sequence[str],
        entries: Sequence[TokenLogprob],
        token_of: TokenOf,
        offset: int = 0,
    ) -> dict[str, object]:
        """Log-probabilities of tokens. ``offset`` is the start of their text in the whole text."""
        if self.is_chat:
            content = [
                {
                    **_described(token_of(token_id), entry.logprob),
                    "top_logprobs": [_described(token_of(i), lp) for i, lp in entry.top],
                }
                for token_id, entry in zip(ids, entries, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": [named(token_of(token_id)) for token_id in ids],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                # Includes the sampled token, which may not be among the most likely.
                {named(token_of(i)): lp for i, lp in (*entry.top, (token_id, entry.logprob))}
                for token_id, entry in zip(ids, entries, strict=True)
            ],
            "text_offset": offsets,
        }

    async def logprobs_in_turns(
        self,
        ids: Sequence[int],
        texts: Sequence[str],
        entries: Sequence[TokenLogprob],
        token_of: TokenOf,
    ) -> dict[str, object]:
        """Log-probabilities of a whole text, computed in steps so that the event loop can do other
        work. Large parts are already encoded, so that the answer only needs to be joined."""
        told: dict[str, object] = {}
        offset = 0
        for begin in range(0, len(ids), _TOKENS_AT_ONCE):
            if begin:
                await asyncio.sleep(0)
            some = slice(begin, begin + _TOKENS_AT_ONCE)
            part = self.logprobs(ids[some], texts[some], entries[some], token_of, offset)
            offset += sum(map(len, texts[some]))
            for name, values in part.items():
                if not isinstance(values, list):
                    told[name] = values
                    continue
                if name in _LARGE:
                    values = [msgspec.Raw(_encode(value)) for value in values]
                kept = told.setdefault(name, [])
                assert isinstance(kept, list)
                kept += values
        return told


class Deltas:
    """Makes the ``delta`` of each chat chunk. A call's free text is sent when it is complete."""

    def __init__(self, free_texts: Set[str]) -> None:
        self._free_texts = free_texts
        self.texts: dict[int, list[str]] = {}
        """Parts of the arguments of open free-text calls, by call index."""

    def of(self, pieces: Iterable[Piece]) -> dict[str, object]:
        """The delta for ``pieces``."""
        reasoning = content = ""
        calls: list[dict[str, object]] = []
        for piece in pieces:
            match piece:
                case Content(text):
                    content += text
                case Reasoning(text):
                    reasoning += text
                case CallBegins(index, name):
                    if is_text := name in self._free_texts:
                        self.texts[index] = []
                    call = {"index": index, "id": new_call_id()}
                    calls.append(call | _call("", name, is_text))
                case CallArguments(index, json) if index in self.texts:
                    self.texts[index].append(json)
                case CallArguments(index, json):
                    calls.append({"index": index} | _call(json))
                case CallEnds(index) | CallFails(index, is_cut=True) if index in self.texts:
                    arguments = "".join(self.texts.pop(index))
                    calls.append({"index": index} | _call(arguments, is_text=True))
                case CallFails(index, text, is_cut=False):
                    self.texts.pop(index, None)
                    content += text  # the client cannot use a partial call
        delta: dict[str, object] = _reasoning(reasoning) if reasoning else {}
        if content:
            delta["content"] = content
        if calls:
            delta["tool_calls"] = calls
        return delta


def _call(arguments: str, name: str = "", is_text: bool = False) -> dict[str, object]:
    """A call, or without a name more of a call. ``is_text``: of a free-text tool."""
    kind = "custom" if is_text else "function"
    said = {INPUT: free_text(arguments)} if is_text else {"arguments": arguments}
    return {"type": kind, kind: {"name": name} | said} if name else {kind: said}


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _reasoning(text: str) -> dict[str, object]:
    """A model's thinking, under the name that most clients read and under vLLM's newer name."""
    return {"reasoning_content": text, "reasoning": text}


CHAT = Shape(ID_PREFIXES[Api.CHAT], "chat.completion", "chat.completion.chunk", is_chat=True)
COMPLETION = Shape(
    ID_PREFIXES[Api.COMPLETIONS], "text_completion", "text_completion", is_chat=False
)


def stop_reason(ending: Ending) -> str | int | None:
    """The stop string or token id that ended a text."""
    return ending.stop or ending.stop_token_id


def stop_text(ending: Ending, tokens: VocabularyTexts) -> str:
    """The text of the stop string or token, for clients that want it in the answer."""
    if ending.stop_token_id is None:
        return ending.stop
    return tokens.token(ending.stop_token_id).text


def usage(tasks: Sequence[Task], n: int) -> dict[str, object]:
    """Usage of a request's ended tasks, ``n`` per prompt. Each prompt counts once."""
    prompts = tasks[::n]
    counts = token_counts(
        sum(task.prompt_tokens for task in prompts), sum(task.completion_tokens for task in tasks)
    )
    cached = sum(task.cached_tokens for task in prompts)
    return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}


def token_counts(prompt: int, completion: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _described(token: SpelledToken, logprob: float) -> dict[str, object]:
    data = None if token.data is None else list(token.data)
    return {"token": token.text, "logprob": logprob, "bytes": data}


def named(token: SpelledToken) -> str:
    """A token's name in OpenAI's older format, which has no field for bytes."""
    return token.text if token.is_text or token.data is None else f"bytes:{token.text}"


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    499: "cancelled_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_CODES = {Code.CONTEXT_OVERFLOW: "context_length_exceeded"}
"""OpenAI's error codes that clients depend on."""


def error_body(error: TidegateError) -> dict[str, object]:
    other = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "error": {
            "message": error.message,
            "type": _TYPES.get(error.status, other),
            "param": error.field,
            "code": _CODES.get(error.code, error.code.value),
            **error.details,
        }
    }


OPENAI = Dialect(
    "/v1",
    lambda error, request_id: error_body(error),
    time_header="openai-processing-ms",
    tells_queue=True,
    is_tolerant=True,
)
