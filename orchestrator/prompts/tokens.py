"""The texts of single tokens, equal to the workers' texts."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from tokenizers import Tokenizer

from protocol.token_bytes import TokenPieces, token_bytes_of

_LOOKED_AT = 16
"""Tokens at the end of a prompt that are searched for a tag. No tag has more tokens."""


class SpelledToken(NamedTuple):
    """The text of one token. Part of a character is written as ``\\xe2\\x80`` in ``text``.

    ``data`` is None if the bytes depend on the adjacent tokens.
    """

    text: str
    data: bytes | None

    @property
    def is_text(self) -> bool:
        """Whether its bytes are complete characters."""
        return self.data is not None and self.text.encode() == self.data


class VocabularyTexts:
    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._to_bytes = token_bytes_of(tokenizer)
        self._pieces = (
            None
            if self._to_bytes is None
            else TokenPieces(tokenizer, self._to_bytes, frozenset(eos_token_ids))
        )
        by_id = tokenizer.get_added_tokens_decoder()
        self._special = {token.content: i for i, token in by_id.items() if token.special}
        self.token_text = lru_cache(maxsize=65536)(self._decode_one)
        self.token = lru_cache(maxsize=65536)(self._look_up)

    def end_of(self, ids: Sequence[int]) -> str:
        """A prompt's last text, with special tokens. A template may begin the thinking there."""
        return "".join(map(self.token_text, ids[-_LOOKED_AT:]))

    def all_bytes(self) -> Sequence[bytes]:
        """The bytes of each token. Special and other added tokens have their written form. Empty if
        the tokenizer does not reveal the bytes."""
        to_bytes = self._to_bytes
        if to_bytes is None:
            return ()
        added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        return [
            token.encode() if token in added else to_bytes(token)
            for token in self._tokenizer.get_vocab(with_added_tokens=True)
        ]

    def special_ids(self, spellings: Iterable[str]) -> dict[int, str]:
        """The special tokens among ``spellings``, by id. The text of an answer omits them."""
        ids = self._special
        return {ids[spelling]: spelling for spelling in spellings if spelling in ids}

    def text_of(self, ids: Sequence[int]) -> str | None:
        """The text of ids that continue a prompt, exactly as workers decode them. None if the text
        ends inside a character or depends on more than the ids."""
        if self._pieces is None:
            return None
        try:
            return b"".join([self._pieces[token_id] for token_id in ids]).decode()
        except UnicodeDecodeError:
            return None

    def _look_up(self, token_id: int) -> SpelledToken:
        data = b"" if self._pieces is None else self._pieces[token_id]
        if data:
            return SpelledToken(data.decode(errors="backslashreplace"), data)
        text = self.token_text(token_id)  # pieces do not have a special token's text
        return SpelledToken(text, None if "\ufffd" in text else text.encode())

    def _decode_one(self, token_id: int) -> str:
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text
