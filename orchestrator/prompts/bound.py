"""A lower bound on how many tokens a text has, in a millisecond or two per megabyte.

Every token covers at most as many bytes as the longest one that holds the byte in question. So with
``longest[b]`` the length of the longest token that holds byte ``b``, the sum of ``1 / longest[b]``
over a text's bytes is no more than its tokens: each of them adds at most ``length · 1 / length``.
"""

import json
import unicodedata
from collections.abc import Iterable
from typing import Any

import numpy as np
from tokenizers import Tokenizer

_CHUNK = 2**18


class TokenBound:
    """A lower bound that holds for every text, or 0 if there is none. ``spellings`` are the bytes
    that tokens stand for."""

    def __init__(self, tokenizer: Tokenizer, spellings: Iterable[bytes]) -> None:
        parts = json.loads(tokenizer.to_str())
        self._holds = _keeps_every_byte(parts)
        self._composes = {"type": "NFC"} in _steps(parts["normalizer"], "normalizers")
        longest = [0] * 256
        for spelling in spellings:
            length = len(spelling)
            for byte in set(spelling):
                if length > longest[byte]:
                    longest[byte] = length
        self._weights = np.array([1 / length if length else 0.0 for length in longest])
        if any(
            token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()
        ):
            self._weights[list(b" \t\n\r\v\f\xa0\x85")] = 0.0  # such tokens take all of these

    def least_tokens(self, text: str) -> int:
        """A number of tokens that no encoding of ``text`` falls below, without added ones."""
        if not self._holds:
            return 0
        if self._composes and not text.isascii() and not unicodedata.is_normalized("NFC", text):
            return 0  # other bytes than these become tokens
        data = np.frombuffer(text.encode(errors="replace"), np.uint8)
        counts = np.zeros(256, np.int64)
        for start in range(0, len(data), _CHUNK):
            counts += np.bincount(data[start : start + _CHUNK], minlength=256)
        return int(float(counts @ self._weights) * (1 - 1e-9))


def _keeps_every_byte(parts: dict[str, Any]) -> bool:
    """Whether the tokens of a text spell all of it, except for its Unicode composition."""
    model = parts["model"]
    has_unknown = model.get("unk_token") is not None or model.get("unk_id") is not None
    return (
        model["type"] in ("BPE", "Unigram")
        and (not has_unknown or bool(model.get("byte_fallback")))
        and all(map(_only_respells, _steps(parts["normalizer"], "normalizers")))
        and all(map(_only_splits, _steps(parts["pre_tokenizer"], "pretokenizers")))
    )


def _only_respells(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "NFC" | "Prepend"}:
            return True
        case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
            return True
    return False


def _only_splits(step: dict[str, Any]) -> bool:
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return step["type"] in ("ByteLevel", "Metaspace", "Digits")


def _steps(part: dict[str, Any] | None, many: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return list(part[many]) if part["type"] == "Sequence" else [part]
