"""A job's growing text: detokenized, and cut before stop strings, which are never shown."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from worker.text.detokenizer import Detokenizer


class Passed(NamedTuple):
    """Text that may be shown. ``stopped``: a stop string followed it and ended the text."""

    text: str
    stopped: bool


class StopMatcher:
    """Cuts a text before the first stop string that completes; if several do, before the longest.

    Holds back only what may still become a stop string. Each stop string is tracked by the length
    of its longest prefix that ends the text (Knuth, Morris, Pratt), so a character costs the same
    for any split of the text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._fallbacks = tuple(_fallback(stop) for stop in stops)
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._matched = [0] * len(stops)
        self._held = ""
        self.found = ""
        """The stop string that ended the text; empty before that."""

    def feed(self, text: str) -> Passed:
        """Return text that cannot be part of a stop string, after the text held back before."""
        if not self._held and self._first_chars.isdisjoint(text):
            return Passed(text, False)
        seen = self._held + text
        for position, char in enumerate(text, len(self._held) + 1):
            found = self._advance(char)
            if found:
                self.found = found
                self._held = ""
                return Passed(seen[: position - len(found)], True)
        keep = max(self._matched)
        self._held = seen[len(seen) - keep :]
        return Passed(seen[: len(seen) - keep], False)

    def flush(self) -> str:
        """Return the text that was held back, at the end of the text."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> str:
        """Take one character. Returns the longest stop string that it completes, or ""."""
        longest = ""
        for i, stop in enumerate(self._stops):
            matched, fallback = self._matched[i], self._fallbacks[i]
            while matched and stop[matched] != char:
                matched = fallback[matched - 1]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                longest = max(longest, stop, key=len)
                matched = 0
            self._matched[i] = matched
        return longest


def _fallback(pattern: str) -> tuple[int, ...]:
    """The length, for each prefix of ``pattern``, of its longest proper prefix that is a suffix."""
    table = [0] * len(pattern)
    matched = 0
    for i in range(1, len(pattern)):
        while matched and pattern[i] != pattern[matched]:
            matched = table[matched - 1]
        if pattern[i] == pattern[matched]:
            matched += 1
        table[i] = matched
    return tuple(table)


class Fed(msgspec.Struct, frozen=True, gc=False):
    """Result of ``feed``: ``texts[i]`` is the text that ``ids[i]`` completed, "" while held back.

    ``stopped_at`` is the index of the id that completed a stop string: the text before the string
    is in the texts up to there, and later ids are ignored.
    """

    texts: list[str]
    stopped_at: int | None = None


class TextStream:
    """One job's text, used by one thread. After ``stopped_at`` the text is over: feed no more."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        stop_ids: Sequence[int] = (),
    ) -> None:
        """``stop`` strings count only after the first ``min_tokens`` tokens. A token of
        ``stop_ids`` ends the text and is not part of it."""
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop) if stop else None
        self._exempt_tokens = min_tokens
        self._stop_ids = frozenset(stop_ids)
        self.stop_token_id: int | None = None
        """The client's stop token that ended the text; None before that."""

    @property
    def stop(self) -> str:
        """The stop string that ended the text; empty before that."""
        return "" if self._matcher is None else self._matcher.found

    def feed(self, ids: Sequence[int]) -> Fed:
        """Take new token ids; texts are parallel to them."""
        # The engine ends a job at such a token, and yields none before it is allowed.
        if self._stop_ids and ids and ids[-1] in self._stop_ids:
            fed = self._fed(ids[:-1])
            if fed.stopped_at is None:
                self.stop_token_id = ids[-1]
            return Fed([*fed.texts, ""], fed.stopped_at)
        return self._fed(ids)

    def _fed(self, ids: Sequence[int]) -> Fed:
        texts = self._detokenizer.feed(ids)
        if self._matcher is None:
            return Fed(texts)
        exempt = min(self._exempt_tokens, len(ids))
        self._exempt_tokens -= exempt
        for i in range(exempt, len(texts)):
            texts[i], stopped = self._matcher.feed(texts[i])
            if stopped:
                texts[i + 1 :] = [""] * (len(texts) - i - 1)
                return Fed(texts, i)
        return Fed(texts)

    def flush(self) -> Passed:
        """Return the text that was held back, at the end of a text without a stop string."""
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return Passed(rest, False)
        passed = self._matcher.feed(rest)
        return passed if passed.stopped else Passed(passed.text + self._matcher.flush(), False)
