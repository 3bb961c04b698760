"""Prompts and texts at rest, encrypted where the operator has set a key (AES-256-GCM)."""

import base64
import binascii
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
_NONCE_BYTES = 12
_PLAIN, _SEALED = b"\x00", b"\x01"
_PROBE = b"tidegate"


class WrongKey(ValueError):
    """What was sealed cannot be opened; the message says what to do."""


def read_key(text: str) -> bytes:
    """The key that a setting spells. Raises ``ValueError``."""
    try:
        key = base64.b64decode(text.strip().replace("-", "+").replace("_", "/"), validate=True)
    except binascii.Error:
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError(
            f"expected {KEY_BYTES} random bytes in base64; `openssl rand -base64 {KEY_BYTES}` "
            "makes one"
        )
    return key


class Sealer:
    """Seals and opens blobs. Each is bound to its place, so that none passes for another."""

    def __init__(self, key: bytes | None = None) -> None:
        """Raises ``ValueError`` where the library is missing."""
        self._cipher: AESGCM | None = None if key is None else _cipher_of(key)

    @property
    def has_key(self) -> bool:
        return self._cipher is not None

    def seal(self, blob: bytes, place: str) -> bytes:
        """``blob`` as it is stored at ``place``, which must be named again to open it."""
        if self._cipher is None:
            return _PLAIN + blob
        nonce = os.urandom(_NONCE_BYTES)
        return _SEALED + nonce + self._cipher.encrypt(nonce, blob, place.encode())

    def open(self, stored: bytes, place: str) -> bytes:
        """What was sealed. Raises ``WrongKey``."""
        if stored[:1] == _PLAIN:
            return stored[1:]
        if self._cipher is None:
            raise WrongKey("the journal is encrypted; set TIDEGATE_JOURNAL_KEY to its key")
        from cryptography.exceptions import InvalidTag

        nonce, sealed = stored[1 : 1 + _NONCE_BYTES], stored[1 + _NONCE_BYTES :]
        try:
            return self._cipher.decrypt(nonce, sealed, place.encode())
        except InvalidTag:
            raise WrongKey(
                "TIDEGATE_JOURNAL_KEY is not the key that the journal was encrypted with; set "
                "that one, or another TIDEGATE_JOURNAL_PATH"
            ) from None

    def probe(self) -> bytes:
        """Something sealed, to tell the right key by."""
        return self.seal(_PROBE, "probe")

    def check(self, probe: bytes) -> None:
        """Raises ``WrongKey`` unless ``probe`` was made with the same key."""
        self.open(probe, "probe")


def _cipher_of(key: bytes) -> "AESGCM":
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise ValueError(
            "encryption needs the library cryptography: pip install 'tidegate[journal]'"
        ) from None
    return AESGCM(key)
