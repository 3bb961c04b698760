"""Finds the bytes of each token id, from the tokenizer's decoder.

Three families cover nearly every vocabulary: byte-level BPE (each character of a token spells one
byte), byte fallback (``<0xE2>`` is a byte, the rest is text), and "▁" for a space. All three
decode a text as the concatenation of its tokens' bytes. Generated text continues a prompt, so no
leading space is stripped.
"""

import json
import re
from collections.abc import Callable

from tokenizers import Tokenizer as HfTokenizer

TokenBytes = Callable[[str], bytes]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenPieces(dict[int, bytes]):
    """``pieces[id]``: the bytes of a token, computed on first use.

    Empty for special tokens (unless ``shown``), ``silent`` ids and ids that the vocabulary lacks.
    """

    def __init__(
        self,
        tokenizer: HfTokenizer,
        to_bytes: TokenBytes,
        silent: frozenset[int],
        *,
        shown: bool = False,
    ):
        super().__init__()
        self._tokenizer = tokenizer
        self._to_bytes = to_bytes
        added = tokenizer.get_added_tokens_decoder()
        special = {id for id, token in added.items() if token.special}
        self._silent = silent if shown else silent | special
        self._special = special

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        piece = b""
        if token is not None and token_id not in self._silent:
            piece = token.encode() if token_id in self._special else self._to_bytes(token)
        self[token_id] = piece
        return piece


def token_bytes_of(tokenizer: HfTokenizer) -> TokenBytes | None:
    """The function from a token to its bytes; None if the decoder does more than join these."""
    decoder = json.loads(tokenizer.to_str())["decoder"]
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level
    if kinds == ["Metaspace"]:
        return lambda token: token.replace(steps[0]["replacement"], " ").encode()
    if "ByteFallback" in kinds:
        return _byte_fallback(steps)
    return None


def _byte_fallback(steps: list[dict[str, object]]) -> TokenBytes | None:
    replacements: list[tuple[str, str]] = []
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)}:
                replacements.append((old, " "))
            case {"type": "ByteFallback" | "Fuse"} | {"type": "Strip", "stop": 0}:
                pass
            case _:
                return None

    def to_bytes(token: str) -> bytes:
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(match[1])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return to_bytes


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + i): byte for i, byte in enumerate(_OTHERS)
}
"""The 256 printable characters that byte-level vocabularies use for bytes (from GPT-2)."""


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[char] for char in token)
    except KeyError:  # an added token is plain text
        return token.encode()
