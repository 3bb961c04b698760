"""Token ids to text, a few at a time, never half a character."""

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer as HfTokenizer
from tokenizers.decoders import DecodeStream

from worker.protocol.token_bytes import TokenPieces


class Detokenizer(Protocol):
    """One job's text. The results joined, ``flush`` included, are the decode of all ids."""

    def feed(self, ids: Sequence[int]) -> list[str]:
        """What each id made printable: empty for special tokens and incomplete characters."""

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed."""


class TokenTexts(dict[int, str | None]):
    """Text of a token that is valid UTF-8 by itself, None for one that is not. Shared by jobs."""

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
    """For vocabularies whose tokens are bytes: joins them and decodes what is complete.

    Invalid bytes become what ``bytes.decode("utf-8", "replace")`` of the whole would make of them.
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
    """For any other decoder: the tokenizer library's own stream."""

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
