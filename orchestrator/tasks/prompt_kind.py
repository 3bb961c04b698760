"""What kind of prompt a task has, as far as the length of its answer may depend on it.

Only hashes, keyed by this process: nobody can tell from one what was said, or compare it with those
of another process.
"""

import os
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from orchestrator.tasks.job import Chat, Job, Message, Prompt

_KEY = os.urandom(32)
_MOST_CHARS = 4096
"""Of a text that are looked at: prompts of one kind begin alike."""
_OPENING_WORDS = (1, 3)
_HEAD_TOKENS = 16
"""Of a prompt that comes as token ids, so many after the first, which only says that a text begins,
stand for its instructions. Prompts that are hardly longer have none."""
_SYSTEM_ROLES = ("system", "developer")


class PromptKind(NamedTuple):
    """``instructions`` are system messages, tools and what the answer must match; ``opening`` are
    the first word of the last turn, and the first few; of a prompt that comes as token ids, the
    first ids after the one that says that a text begins. Empty where there are none."""

    instructions: bytes = b""
    opening: tuple[bytes, ...] = ()


ANY_KIND = PromptKind()


def kind_of(job: Job, prompt: Prompt) -> PromptKind:
    """The kind of a prompt: microseconds, however long it is."""
    asked = [job.grammar.kind, job.grammar.text] if job.grammar is not None else []
    if isinstance(prompt, str):
        return PromptKind(_hash(asked), _opening(prompt))
    messages = prompt.messages if isinstance(prompt, Chat) else prompt
    if messages and not isinstance(messages[0], Message):
        ids = [str(token) for token in messages[1 : 1 + _HEAD_TOKENS]]
        if len(messages) > 2 * _HEAD_TOKENS:
            asked += ids
        return PromptKind(_hash(asked), _openings(ids) if len(ids) >= max(_OPENING_WORDS) else ())
    turns = [one for one in messages if isinstance(one, Message)]
    asked += [one.content for one in turns[:2] if one.role in _SYSTEM_ROLES]
    if isinstance(prompt, Chat):
        asked += [tool.name for tool in prompt.tools]
    return PromptKind(_hash(asked), _opening(turns[-1].content) if turns else ())


def _opening(text: str) -> tuple[bytes, ...]:
    return _openings(text[:_MOST_CHARS].casefold().split(maxsplit=max(_OPENING_WORDS)))


def _openings(words: Sequence[str]) -> tuple[bytes, ...]:
    return tuple(_hash(words[:count]) for count in _OPENING_WORDS if len(words) >= count)


def _hash(texts: Iterable[str]) -> bytes:
    """Of these texts in this order; empty for none."""
    parts = [text[:_MOST_CHARS] for text in texts]
    if not parts:
        return b""
    return blake2b(msgspec.msgpack.encode(parts), key=_KEY, digest_size=8).digest()
