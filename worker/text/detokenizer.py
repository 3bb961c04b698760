"""Decodes token ids to text incrementally, without splitting characters."""

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer as HfTokenizer
from tokenizers.decoders import DecodeStream

from protocol.token_bytes import TokenPieces


class Detokenizer(Protocol):
    """Decodes one job's ids. All results joined, including ``flush``, are the text of all ids."""

    def feed(self, ids: Sequence[int]) -> list[str]:
        """The text that each id completes: empty for special tokens and incomplete characters."""

    def flush(self) -> str:
        """The text left at the end: U+FFFD for a character that was never completed."""


class TokenTexts(dict[int, str | None]):
    """Texts by token; None for a token that is not valid UTF-8 by itself. Shared by jobs."""

    def __init__(self, pieces: TokenPieces) -> None:
        super().__init__()
        self.pieces = pieces

    def __missing__(self, token_id: int) -> str | None:
        try:
            text: str | None = self.pieces[token_id].decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


class ByteDetokenizer:
    """A ``Detokenizer`` for tokens that are bytes: joins them and decodes complete characters.

    Invalid bytes give the same result as ``bytes.decode("utf-8", "replace")`` of the whole text.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_mid_character = False

    def feed(self, ids: Sequence[int]) -> list[str]:
        if not self._is_mid_character:
            if len(ids) == 1:  # nearly always
                text = self._texts[ids[0]]
                return [self._one(ids[0]) if text is None else text]
            lookup = self._texts
            plain = [lookup[id] for id in ids]
            if None not in plain:
                return plain  # type: ignore[return-value]
        return [self._one(id) for id in ids]

    def flush(self) -> str:
        self._is_mid_character = False
        return self._decoder.decode(b"", final=True)

    def _one(self, token_id: int) -> str:
        piece = self._texts.pieces[token_id]
        text = self._decoder.decode(piece)
        if piece:
            self._is_mid_character = bool(self._decoder.getstate()[0])
        return text


class LibraryDetokenizer:
    """A ``Detokenizer`` for any other vocabulary; uses the tokenizer library's own stream."""

    def __init__(
        self, tokenizer: HfTokenizer, silent: frozenset[int], *, skip_special: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._silent = silent
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        self._pending: list[int] = []

    def feed(self, ids: Sequence[int]) -> list[str]:
        return [self._one(id) for id in ids]

    def flush(self) -> str:
        left, self._pending = self._pending, []
        return self._tokenizer.decode(left, skip_special_tokens=self._skip_special)

    def _one(self, token_id: int) -> str:
        if token_id in self._silent:
            return ""
        text = self._stream.step(self._tokenizer, token_id)
        if text is None:
            self._pending.append(token_id)
            return ""
        self._pending.clear()
        return text
