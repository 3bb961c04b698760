"""Kinds of prompts (text, chat, token ids), and their length before they are encoded."""

import sys
from typing import Final

from orchestrator.prompts.turns import chars_of, uses_tools
from orchestrator.tasks.job import Chat, Prompt

INLINE_CHARS: Final = 2000
"""Most characters of a prompt that takes the event loop less than a millisecond."""

_MESSAGE_CHARS = 16
"""Additional cost of a message for the chat template, in equivalent characters."""

_TOKEN_CHARS = 4


def is_short(prompt: Prompt) -> bool:
    """Whether encoding is fast enough for the event loop."""
    if isinstance(prompt, str):
        return len(prompt) <= INLINE_CHARS
    if is_ids(prompt):
        return True
    return chars_of(chat_of(prompt), _MESSAGE_CHARS) <= INLINE_CHARS


def bytes_of(prompt: Prompt) -> int:
    """Bytes of memory of a prompt's text."""
    if isinstance(prompt, str):
        return sys.getsizeof(prompt)
    if is_ids(prompt):
        return 0
    chat = chat_of(prompt)
    sizes = sum(sys.getsizeof(message.content) for message in chat.messages)
    return sizes + (chars_of(chat, 0) if uses_tools(chat) else 0)


def tokens_about(prompt: Prompt) -> int:
    """Approximate number of tokens of a prompt, without a tokenizer."""
    if isinstance(prompt, tuple) and is_ids(prompt):
        return len(prompt)
    if isinstance(prompt, str):
        return len(prompt) // _TOKEN_CHARS
    return chars_of(chat_of(prompt), _MESSAGE_CHARS) // _TOKEN_CHARS


def is_ids(prompt: Prompt) -> bool:
    return isinstance(prompt, tuple) and (not prompt or isinstance(prompt[0], int))


def has_turns(prompt: Prompt) -> bool:
    """Whether the prompt is a chat with at least one turn."""
    return not isinstance(prompt, str) and not is_ids(prompt) and bool(chat_of(prompt).messages)


def chat_of(prompt: Prompt) -> Chat:
    if isinstance(prompt, Chat):
        return prompt
    return Chat(prompt)  # type: ignore[arg-type]  # the others were told apart
