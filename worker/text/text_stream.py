"""A job's text as it grows: detokenised, cut at stop strings."""

from collections.abc import Sequence

import msgspec

from worker.text.detokenizer import Detokenizer
from worker.text.stop_strings import Passed, StopMatcher


class Fed(msgspec.Struct, frozen=True, gc=False):
    """Result of ``feed``: ``texts[i]`` is the text that ``ids[i]`` completed, "" while held back.

    ``stopped_at`` is the index of the id that completed a stop string: the text before the string
    is in the texts up to there, and later ids are ignored.
    """

    texts: list[str]
    stopped_at: int | None = None


class TextStream:
    """One job's text, used by one thread. After a ``stopped_at`` it is over: feed no more."""

    def __init__(
        self, detokenizer: Detokenizer, stop: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        """``stop`` strings count in the text that comes after the first ``min_tokens`` tokens."""
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop) if stop else None
        self._exempt_tokens = min_tokens
        self.stop_token_id: int | None = None
        """The client's stop token that ended the text; None while none has."""

    @property
    def stop(self) -> str:
        """The stop string that ended the text; empty while none has."""
        return "" if self._matcher is None else self._matcher.found

    def feed(self, ids: Sequence[int]) -> Fed:
        """Take new token ids; texts are parallel to them."""
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
        """The text that was held back, at the end of a text that no stop string has ended."""
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return Passed(rest, False)
        passed = self._matcher.feed(rest)
        return passed if passed.stopped else Passed(passed.text + self._matcher.flush(), False)


class StopTokenStream(TextStream):
    """A ``TextStream`` for a job with stop tokens, which end its text and are not part of it."""

    def __init__(
        self,
        stop_ids: frozenset[int],
        detokenizer: Detokenizer,
        stop: Sequence[str],
        min_tokens: int,
    ) -> None:
        super().__init__(detokenizer, stop, min_tokens)
        self._stop_ids = stop_ids

    def feed(self, ids: Sequence[int]) -> Fed:
        # The engine ends a job with such a token, and yields none before one may come.
        if not ids or ids[-1] not in self._stop_ids:
            return super().feed(ids)
        fed = super().feed(ids[:-1])
        if fed.stopped_at is None:
            self.stop_token_id = ids[-1]
        return Fed([*fed.texts, ""], fed.stopped_at)
