"""Supports servers that accept and return only text: converts ids to prompts, and cuts texts at
stop strings.

Here a prompt is token ids, made with the model's own tokenizer and chat template. A server that
accepts text gets the text of those ids, and encodes it with its own tokenizer:

- Tokens that the server's tokenizer adds to every prompt (a begin token) are left out here.
- A text that only looks like a special token would become one there. Such a prompt is refused: its
  author could end a message and continue as the system.
- Otherwise the server may split the same text into other tokens.
"""

import asyncio
from collections.abc import Sequence
from threading import Lock
from typing import Final

from tokenizers import Tokenizer

INLINE_IDS: Final = 2048
"""Number of ids that become text, and are checked, within a millisecond or two."""
_COUNTED_CHARS: Final = 256
"""Length of a text, in characters, that is cut into tokens within a fraction of a millisecond."""


class UnsendablePrompt(ValueError):
    """The server would read a different prompt; the message says why."""


class PromptText:
    """Prompts of one tokenizer as text. May be used on any thread."""

    def __init__(self, tokenizer_json: bytes) -> None:
        self._tokenizer = Tokenizer.from_buffer(tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a", add_special_tokens=True).ids
        at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain and plain), 0)
        self._before: list[int] = whole[:at]
        self._lock = Lock()

    def text_of(self, ids: Sequence[int]) -> str:
        """The text to send for a prompt. Raises ``UnsendablePrompt``."""
        rest = list(ids)
        if self._before and rest[: len(self._before)] == self._before:
            del rest[: len(self._before)]
        with self._lock:
            text: str = self._tokenizer.decode(rest, skip_special_tokens=False)
            read = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._specials(read) != self._specials(rest):
            raise UnsendablePrompt(
                "this model's server takes text, and would read special tokens in this prompt that "
                "are plain text in it: leave them out, or ask for an instance that takes token ids "
                '("placement": {"capabilities": ["token_ids"]})'
            )
        return text

    async def prompt_of(self, ids: Sequence[int]) -> str:
        """Make the text of a prompt, a long one on a thread. Raises ``UnsendablePrompt``."""
        if len(ids) <= INLINE_IDS:
            return self.text_of(ids)
        return await asyncio.to_thread(self.text_of, ids)

    def count(self, text: str) -> int:
        """The number of tokens of a text, for servers that do not report it."""
        with self._lock:
            return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _specials(self, ids: Sequence[int]) -> list[int]:
        return [i for i in ids if i in self._special]


class TokenCounter:
    """Counts the tokens of a text that arrives in parts. The end of the text is recounted with each
    part, so that a token that arrives in two halves counts once."""

    def __init__(self, tokenizer: PromptText) -> None:
        self._tokenizer = tokenizer
        self._end = ""
        self._before = 0
        """Number of tokens before ``_end``."""

    def feed(self, text: str) -> int:
        """The number of tokens of all text so far."""
        self._end += text
        if len(self._end) > _COUNTED_CHARS:
            at = self._end.rfind(" ", 1)
            at = at if at > 0 else len(self._end)
            self._before += self._tokenizer.count(self._end[:at])
            self._end = self._end[at:]
        return self._before + self._tokenizer.count(self._end)


class StopCutter:
    """Ends a text before the first of its stop strings, for servers that do not remove it. It holds
    back a possible start of a stop string until more text arrives."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self.held = ""
        """The text that is held back."""
        self.found = ""
        """The stop string that ended the text; empty if none has."""

    def feed(self, text: str) -> str:
        """The part of the text that may be shown now; empty after ``found``."""
        if self.found:
            return ""
        text, self.held = self.held + text, ""
        places = [(at, -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if places:
            at, _, self.found = min(places)
            return text[:at]
        longest = max(map(len, self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                self.held = text[-size:]
                return text[:-size]
        return text
