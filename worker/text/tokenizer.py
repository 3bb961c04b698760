"""A checkpoint's tokenizer, with its special tokens and chat template."""

from collections.abc import Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

from protocol import Sampling
from protocol.token_bytes import TokenPieces, token_bytes_of
from protocol.tokenizer_files import UnreadableTokenizer, read_tokenizer_files, special_tokens_of
from worker.errors import TokenizerError
from worker.text.detokenizer import ByteDetokenizer, Detokenizer, LibraryDetokenizer, TokenTexts
from worker.text.text_stream import TextStream


class Tokenizer:
    """Encodes prompts and opens a text stream per job. All streams share its tables.

    ``silent_ids`` (end-of-sequence tokens) and its own ``eos_token`` have no text even if the
    vocabulary does not mark them as special. Without ``special_in_prompts``, text in a prompt that
    looks like a special token stays text.
    """

    def __init__(
        self,
        tokenizer_json: bytes,
        settings: dict[str, Any],
        chat_template: str,
        silent_ids: Sequence[int] = (),
        *,
        special_in_prompts: bool = True,
    ) -> None:
        self.json = tokenizer_json
        """The contents of ``tokenizer.json``, as in the model card."""
        self.chat_template = chat_template
        """Jinja source; empty if the model has none."""
        self.special_tokens = special_tokens_of(settings)
        """The chat template's variables (``bos_token`` …) with their texts."""
        self._hf = self._prompts = _library_tokenizer(tokenizer_json)
        if not special_in_prompts:  # a second tokenizer: the library sets this per tokenizer
            self._prompts = _library_tokenizer(tokenizer_json)
            self._prompts.encode_special_tokens = True
        own = self.eos_token_id
        self._silent = frozenset(silent_ids if own is None else [*silent_ids, own])
        self._to_bytes = token_bytes_of(self._hf)
        self._texts = self._make_texts(shown=False)

    @classmethod
    def from_directory(
        cls, path: Path, silent_ids: Sequence[int] = (), *, special_in_prompts: bool = True
    ) -> "Tokenizer":
        """Read ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``.

        Only the first must exist. Raises ``TokenizerError``.
        """
        try:
            files = read_tokenizer_files(path)
        except UnreadableTokenizer as error:
            raise TokenizerError(str(error)) from error
        try:
            return cls(*files, silent_ids, special_in_prompts=special_in_prompts)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{path / 'tokenizer.json'} cannot be read: {error}") from error

    @property
    def bos_token_id(self) -> int | None:
        token = self.special_tokens.get("bos_token")
        return None if token is None else self._hf.token_to_id(token)

    @property
    def eos_token_id(self) -> int | None:
        token = self.special_tokens.get("eos_token")
        return None if token is None else self._hf.token_to_id(token)

    def spelling_of(self, token_id: int) -> str:
        """A token as spelled in the vocabulary; empty for an unknown id."""
        return self._hf.id_to_token(token_id) or ""

    @property
    def pieces(self) -> TokenPieces | None:
        """The bytes of each token's text; None if a text is not just these bytes joined."""
        return None if self._texts is None else self._texts.pieces

    @cached_property
    def longest_token_bytes(self) -> int:
        """Maximum bytes of text per token."""
        return max(len(token.encode()) for token in self._hf.get_vocab(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Omit special tokens for a text that a chat template rendered."""
        # Only the batch call releases the GIL, which a lane must not wait for.
        (encoding,) = self._prompts.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def detokenizer(self, *, skip_special: bool = True) -> Detokenizer:
        """A new incremental decoder for one job."""
        texts = self._texts if skip_special else self._texts_with_special
        if texts is None:
            return LibraryDetokenizer(self._hf, self._silent, skip_special=skip_special)
        return ByteDetokenizer(texts)

    def stream_for(self, asked: Sampling, stop_after: int | None = None) -> TextStream:
        """A new text stream for a job that asks for ``asked``. Stop strings count after
        ``stop_after`` tokens, by default ``min_tokens``; other values are for text that began
        elsewhere.
        """
        detokenizer = self.detokenizer(skip_special=asked.skip_special_tokens)
        exempt = asked.min_tokens if stop_after is None else stop_after
        return TextStream(detokenizer, asked.stop, exempt, asked.stop_token_ids)

    @cached_property
    def _texts_with_special(self) -> TokenTexts | None:
        return self._make_texts(shown=True)

    def _make_texts(self, *, shown: bool) -> TokenTexts | None:
        if self._to_bytes is None:
            return None
        return TokenTexts(TokenPieces(self._hf, self._to_bytes, self._silent, shown=shown))

    def plain_words(self, count: int) -> list[int]:
        """Up to ``count`` tokens that are a space and a word, lowest ids first."""
        ids = sorted(self._hf.get_vocab(with_added_tokens=True).values())
        return list(
            islice((i for i in ids if _is_plain_word(self.detokenizer().feed([i])[0])), count)
        )


def _library_tokenizer(tokenizer_json: bytes) -> HfTokenizer:
    tokenizer = HfTokenizer.from_buffer(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _is_plain_word(text: str) -> bool:
    return text.startswith(" ") and text[1:].isascii() and text[1:].isalpha()
