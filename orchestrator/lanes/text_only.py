"""Serves servers that take and give text alone: turns ids into prompts, and cuts texts at stop
strings.

A prompt is token ids here, made with the model's own tokenizer and chat template. A server that
takes text gets what those ids stand for, and reads it with its own tokenizer:

- What that tokenizer puts around every prompt (a begin token) is left out, and put there again.
- A text that only looks like a special token would become one there. Such a prompt is refused:
  its author could end a message and go on as the system.
- Otherwise the server may cut the same text into other tokens. That is the loss.
"""

import asyncio
from collections.abc import Sequence
from threading import Lock

from tokenizers import Tokenizer

from orchestrator.lanes.lane_job import JobFailed, LaneJob
from protocol import Code

INLINE_IDS = 2048
"""Number of ids that become text, and are checked, within a millisecond or two."""


class UnsendablePrompt(ValueError):
    """The server would read something else than the prompt; the message says what."""


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

    async def prompt_of(self, job: LaneJob) -> str:
        """The text of a job's prompt, a long one made on a thread. Raises ``JobFailed``."""
        try:
            if len(job.token_ids) <= INLINE_IDS:
                return self.text_of(job.token_ids)
            return await asyncio.to_thread(self.text_of, job.token_ids)
        except UnsendablePrompt as error:
            raise JobFailed(Code.INVALID_REQUEST, str(error)) from None

    def count(self, text: str) -> int:
        """How many tokens a text has, for servers that do not say."""
        with self._lock:
            return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _specials(self, ids: Sequence[int]) -> list[int]:
        return [i for i in ids if i in self._special]


class StopCutter:
    """Ends a text before the first of its stop strings, for servers that leave it in.

    A possible beginning of a stop string is held back until more is known.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = ""
        """The stop string that ended the text; empty while none has."""

    def feed(self, text: str) -> str:
        """The part of the text that may be shown by now; empty once ``found``."""
        if not self._stops:
            return text
        if self.found:
            return ""
        text = self._held + text
        self._held = ""
        first = min(
            ((at, -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0),
            default=None,
        )
        if first is not None:
            self.found = first[2]
            return text[: first[0]]
        longest = max(map(len, self._stops)) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                self._held = text[-size:]
                return text[:-size]
        return text

    def flush(self) -> str:
        """The text that was held back, once the whole text has ended."""
        held, self._held = self._held, ""
        return held
