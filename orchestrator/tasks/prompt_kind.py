"""The kind of a task's prompt: the properties that may predict the length of its answer.

A kind consists of hashes with a key of this process. It reveals no text, and kinds of different
processes are not comparable.
"""

import os
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from orchestrator.tasks.job import Chat, Message, Prompt
from protocol import Grammar

_KEY = os.urandom(32)
_MAX_CHARS = 4096
"""Number of leading characters that are hashed: prompts of one kind begin alike."""
_OPENING_WORDS = (1, 3)
_HEAD_TOKENS = 16
"""Number of leading token ids, after the first (which only begins a text), that count as the
instructions of a prompt of ids. Prompts that are hardly longer have no instructions."""
_SYSTEM_ROLES = ("system", "developer")


class PromptKind(NamedTuple):
    """Hashes of a prompt. ``instructions``: of system messages, tools and the grammar. ``opening``:
    of the first word of the last turn and of its first few words; for a prompt of token ids, of the
    first ids after the begin-of-text id. Empty if there are none."""

    instructions: bytes = b""
    opening: tuple[bytes, ...] = ()


ANY_KIND = PromptKind()


def kind_of(prompt: Prompt, grammar: Grammar | None = None) -> PromptKind:
    """The kind of a prompt, in microseconds; its answer must match ``grammar``."""
    asked = [grammar.kind, grammar.text] if grammar is not None else []
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
    return _openings(text[:_MAX_CHARS].casefold().split(maxsplit=max(_OPENING_WORDS)))


def _openings(words: Sequence[str]) -> tuple[bytes, ...]:
    return tuple(_hash(words[:count]) for count in _OPENING_WORDS if len(words) >= count)


def _hash(texts: Iterable[str]) -> bytes:
    parts = [text[:_MAX_CHARS] for text in texts]
    if not parts:
        return b""
    return blake2b(msgspec.msgpack.encode(parts), key=_KEY, digest_size=8).digest()
