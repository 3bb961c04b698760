"""The prompt's own part of a completion: its text, and how likely its tokens were.

The first token of a prompt has no log-probability: nothing came before it. A long prompt has a
hundred thousand numbers, so encoding them yields to the event loop in between.
"""

import asyncio
import codecs
from collections.abc import Mapping, MutableMapping, Sequence

import msgspec

from orchestrator.api.openai.shapes import COMPLETION, named
from orchestrator.errors import InvalidRequest, TidegateError
from orchestrator.prompts.tokens import VocabularyTexts
from orchestrator.tasks.job import Prompt
from orchestrator.tasks.task import Task
from protocol import PromptLogprobs, TokenLogprob

MAX_NUMBERS = 2**18
"""Most log-probabilities that an answer may have of its prompts: some 10 MB of JSON."""

_TOKENS_AT_ONCE = 1024
"""Tokens looked up per pass of the event loop."""

_encode = msgspec.json.Encoder().encode
_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def require_few(tokens: int, top: int | None) -> None:
    """Check that an answer may repeat so many prompt tokens, each with ``top`` alternatives (None:
    without log-probabilities). Raises ``InvalidRequest``."""
    if tokens * (1 + (top or 0)) > MAX_NUMBERS:
        what = "" if top is None else f", each with {top} alternatives,"
        raise InvalidRequest(
            f"echo would repeat {tokens} prompt tokens{what} in all choices together, and an answer"
            f" has at most {MAX_NUMBERS} of them: send fewer or shorter prompts, or ask for fewer "
            "alternatives or choices",
            field="echo" if top is None else "prompt",
        )


async def add_echo(
    choice: MutableMapping[str, object],
    prompt: Prompt,
    ids: Sequence[int],
    task: Task,
    tokens: VocabularyTexts,
) -> None:
    """Put the prompt before a choice's text, and its log-probabilities before the text's."""
    text = prompt if isinstance(prompt, str) else "".join(await _texts(ids, tokens))
    choice["text"] = f"{text}{choice['text']}"
    rest, top = choice["logprobs"], task.sampling.logprobs
    if top is None or task.sampling.prompt_logprobs is None:
        return
    assert rest is None or isinstance(rest, dict)
    choice["logprobs"] = await _logprobs(ids, task.prompt_logprobs, top, tokens, rest or {})


async def _logprobs(
    ids: Sequence[int],
    read: Sequence[PromptLogprobs],
    top: int,
    tokens: VocabularyTexts,
    rest: Mapping[str, Sequence[object]],
) -> msgspec.Raw:
    """OpenAI's ``logprobs`` of prompt and text; ``rest`` are those of the text alone. Raises
    ``TidegateError`` if the worker's pieces do not cover the whole prompt."""
    token_of, texts = tokens.token, await _texts(ids, tokens)
    lists: dict[str, list[bytes]] = {name: [] for name in _LISTS}
    _extend(lists, {"tokens": [named(token_of(ids[0]))], "text_offset": [0]})
    _extend(lists, {"token_logprobs": [None], "top_logprobs": [None]})
    at, offset = 1, len(texts[0])
    for piece in read:
        if piece.first != at:
            break
        entries = piece.unpack()
        end = at + len(entries)
        shortened = [TokenLogprob(entry.logprob, entry.top[:top]) for entry in entries]
        part = texts[at:end]
        _extend(lists, COMPLETION.logprobs(ids[at:end], part, shortened, token_of, offset))
        at, offset = end, offset + sum(map(len, part))
        await asyncio.sleep(0)
    if at != len(ids):
        raise TidegateError("the instance returned log-probabilities of a part of the prompt only")
    shifted = [offset + at for at in rest.get("text_offset", ())]  # type: ignore[operator]
    _extend(lists, {**rest, "text_offset": shifted})
    fields = (b'"%b":[%b]' % (name.encode(), b",".join(parts)) for name, parts in lists.items())
    return msgspec.Raw(b"{%b}" % b",".join(fields))


def _extend(lists: Mapping[str, list[bytes]], more: Mapping[str, object]) -> None:
    for name, values in more.items():
        if values:
            lists[name].append(_encode(values)[1:-1])


async def _texts(ids: Sequence[int], tokens: VocabularyTexts) -> list[str]:
    """The text that each token adds: empty while a character is incomplete."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts: list[str] = []
    for begin in range(0, len(ids), _TOKENS_AT_ONCE):
        if begin:
            await asyncio.sleep(0)
        found = [tokens.token(one) for one in ids[begin : begin + _TOKENS_AT_ONCE]]
        texts += [t.text if t.data is None else decoder.decode(t.data) for t in found]
    if tail := decoder.decode(b"", final=True):
        texts[-1] += tail
    return texts
