"""Echo: the prompt's text and the log-probabilities of its tokens in a completion.

The first token of a prompt has no log-probability, because no token precedes it. A long prompt has
100,000 numbers, so encoding yields to the event loop.
"""

import asyncio
import codecs
from collections.abc import Generator, Iterable, Mapping, MutableMapping, Sequence
from typing import TypeVar

import msgspec

from orchestrator.api.openai.shapes import COMPLETION, named
from orchestrator.errors import InvalidRequest, TidegateError
from orchestrator.prompts.tokens import VocabularyTexts
from orchestrator.tasks.job import Prompt
from orchestrator.tasks.task import Task
from protocol import PromptLogprobs, TokenLogprob

T = TypeVar("T")

MAX_NUMBERS = 2**18
"""Most log-probabilities of prompts in an answer: about 10 MB of JSON."""
MAX_STREAMED_NUMBERS = 2**15
"""Most log-probabilities of prompts in a stream. They are one event."""

_TOKENS_AT_ONCE = 1024
"""Tokens that are looked up per pass of the event loop."""

_encode = msgspec.json.Encoder().encode

_Turns = Generator[None, None, T]
"""Work in steps. It yields between steps to let other work run, and returns a ``T``."""


def require_few(tokens: int, top: int | None, *, is_streamed: bool) -> None:
    """Check that an answer may repeat ``tokens`` prompt tokens, each with ``top`` alternatives
    (None: without log-probabilities). Raises ``InvalidRequest``."""
    numbers, most = tokens * (1 + (top or 0)), MAX_STREAMED_NUMBERS if is_streamed else MAX_NUMBERS
    if numbers > most:
        what = "" if top is None else f", each with {top} alternatives,"
        raise InvalidRequest(
            f"echo would repeat {tokens} prompt tokens{what} in all choices together, and an answer"
            f" has at most {most} of them{' when it is streamed' if is_streamed else ''}: send "
            "fewer or shorter prompts, or ask for fewer alternatives or choices",
            field="echo" if top is None else "prompt",
        )


def text_of(prompt: Prompt, ids: Sequence[int], tokens: VocabularyTexts) -> "_Turns[str]":
    if isinstance(prompt, str):
        return prompt
    return "".join((yield from _texts(ids, tokens)))


async def add_echo(
    choice: MutableMapping[str, object],
    prompt: Prompt,
    ids: Sequence[int],
    task: Task,
    tokens: VocabularyTexts,
) -> None:
    """Insert the prompt before a choice's text, and its log-probabilities before the text's."""
    choice["text"] = f"{await _in_turns(text_of(prompt, ids, tokens))}{choice['text']}"
    rest, top = choice["logprobs"], task.sampling.logprobs
    if top is None or task.sampling.prompt_logprobs is None:
        return
    assert rest is None or isinstance(rest, dict)
    turns = echoed_logprobs(ids, task.prompt_logprobs, top, tokens, rest or {})
    choice["logprobs"] = await _in_turns(turns)


def at_once(turns: "_Turns[T]") -> T:
    """Do all steps of the work at once. Returns its result."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            value: T = end.value
            return value


async def _in_turns(turns: "_Turns[T]") -> T:
    while True:
        try:
            next(turns)
        except StopIteration as end:
            value: T = end.value
            return value
        await asyncio.sleep(0)


def echoed_logprobs(
    ids: Sequence[int],
    read: Sequence[PromptLogprobs],
    top: int,
    tokens: VocabularyTexts,
    rest: Mapping[str, Sequence[object]],
) -> "_Turns[msgspec.Raw]":
    """OpenAI's ``logprobs`` of prompt and text. ``rest`` are the ``logprobs`` of the text."""
    token_of, texts = tokens.token, (yield from _texts(ids, tokens))
    lists: dict[str, list[bytes]] = {
        "tokens": [_encode(named(token_of(ids[0])))],
        "token_logprobs": [b"null"],
        "top_logprobs": [b"null"],
        "text_offset": [b"0"],
    }
    offset = len(texts[0])
    for first, entries in _checked(ids, read):
        end = first + len(entries)
        shortened = [TokenLogprob(entry.logprob, entry.top[:top]) for entry in entries]
        part = texts[first:end]
        _extend(lists, COMPLETION.logprobs(ids[first:end], part, shortened, token_of, offset))
        offset += sum(map(len, part))
        yield
    shifted = [offset + at for at in rest.get("text_offset", ())]  # type: ignore[operator]
    _extend(lists, {**rest, "text_offset": shifted})
    fields = (b'"%b":[%b]' % (name.encode(), b",".join(parts)) for name, parts in lists.items())
    return msgspec.Raw(b"{%b}" % b",".join(fields))


def _checked(
    ids: Sequence[int], read: Sequence[PromptLogprobs]
) -> Iterable[tuple[int, list[TokenLogprob]]]:
    """The worker's pieces, each with the position of its first token. Raises ``TidegateError`` if
    they do not cover the whole prompt."""
    at = 1
    for piece in read:
        if piece.first == at:
            at += len(piece)
    if at != len(ids):
        raise TidegateError("the instance returned log-probabilities for only part of the prompt")
    for piece in read:
        yield piece.first, piece.unpack()


def _extend(lists: Mapping[str, list[bytes]], more: Mapping[str, object]) -> None:
    for name, values in more.items():
        if values:
            lists[name].append(_encode(values)[1:-1])


def _texts(ids: Sequence[int], tokens: VocabularyTexts) -> "_Turns[list[str]]":
    """The text of each token; empty while a character is incomplete."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts: list[str] = []
    for begin in range(0, len(ids), _TOKENS_AT_ONCE):
        if begin:
            yield
        found = [tokens.token(one) for one in ids[begin : begin + _TOKENS_AT_ONCE]]
        texts += [t.text if t.data is None else decoder.decode(t.data) for t in found]
    if tail := decoder.decode(b"", final=True):
        texts[-1] += tail
    return texts
