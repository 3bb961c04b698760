"""Encryption of prompts and texts at rest, where the operator has set a key (AES-256-GCM).

A stored blob begins with how it was sealed::

    00                              not at all
    01 nonce(12) text tag(16)       by a key that is not named (files before version 3)
    02 key(4) nonce(12) text tag(16)

With several keys the first one seals and every one opens, so that a key can be replaced.
"""

import base64
import binascii
import hashlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from worker.extras import pip_install

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
PREFIX_BYTES = 5
"""Length of the start of a blob that tells how it was sealed."""
_ID_BYTES = 4
_NONCE_BYTES = 12
_PLAIN, _UNNAMED, _NAMED = b"\x00", b"\x01", b"\x02"
_PROBE = b"tidegate"


class WrongKey(ValueError):
    """A sealed blob cannot be opened; the message says what to do."""


def read_keys(text: str) -> tuple[bytes, ...]:
    """The keys of a setting, separated by commas. Raises ``ValueError``."""
    keys = tuple(_read_key(one) for one in text.split(","))
    if len(set(keys)) < len(keys):
        raise ValueError("the same key is there twice; name each one once, the newest first")
    return keys


def _read_key(text: str) -> bytes:
    try:
        key = base64.b64decode(text.strip().replace("-", "+").replace("_", "/"), validate=True)
    except binascii.Error:
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError(
            f"expected {KEY_BYTES} random bytes in base64; `openssl rand -base64 {KEY_BYTES}` "
            "makes one, and a comma stands between several"
        )
    return key


class Sealer:
    """Seals and opens blobs. Each is bound to its place, so that none passes for another."""

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        """Takes keys of 32 bytes. Raises ``ValueError`` where the library is missing."""
        self._ciphers: dict[bytes, AESGCM] = {_id_of(key): _cipher_of(key) for key in keys}
        self._first = next(iter(self._ciphers), b"")

    @property
    def has_key(self) -> bool:
        return bool(self._ciphers)

    @property
    def prefix(self) -> bytes:
        """The start of every blob that is sealed now."""
        return _NAMED + self._first if self._first else _PLAIN

    @property
    def name(self) -> str:
        """Name of the key that seals, which reveals nothing about it; empty without a key."""
        return self._first.hex()

    def seal(self, blob: bytes, place: str) -> bytes:
        """``blob`` as it is stored at ``place``, which must be named again to open it."""
        if not self._first:
            return _PLAIN + blob
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._ciphers[self._first].encrypt(nonce, blob, place.encode())
        return self.prefix + nonce + sealed

    def open(self, stored: bytes, place: str) -> bytes:
        """The original blob. Raises ``WrongKey``."""
        how = stored[:1]
        if how == _PLAIN:
            return stored[1:]
        if not self._ciphers:
            raise WrongKey("the journal is encrypted; set TIDEGATE_JOURNAL__KEY to its key")
        at = 1
        ciphers = list(self._ciphers.values())
        if how == _NAMED:
            at += _ID_BYTES
            cipher = self._ciphers.get(stored[1:at])
            ciphers = [] if cipher is None else [cipher]
        from cryptography.exceptions import InvalidTag

        nonce, sealed = stored[at : at + _NONCE_BYTES], stored[at + _NONCE_BYTES :]
        for cipher in ciphers:
            try:
                return cipher.decrypt(nonce, sealed, place.encode())
            except (InvalidTag, ValueError):  # another key's, or damaged
                continue
        raise WrongKey(
            "TIDEGATE_JOURNAL__KEY lacks a key that the journal was encrypted with: add it behind "
            "the first one, after a comma, or set another TIDEGATE_JOURNAL__PATH; nothing was "
            "changed"
        )

    def probe(self) -> bytes:
        """A sealed constant, to recognize the right key by."""
        return self.seal(_PROBE, "probe")

    def check(self, probe: bytes) -> None:
        """Raise ``WrongKey`` unless the key that ``probe`` was made with is one of ours."""
        self.open(probe, "probe")


def _id_of(key: bytes) -> bytes:
    return hashlib.sha256(b"tidegate journal key" + key).digest()[:_ID_BYTES]


def _cipher_of(key: bytes) -> "AESGCM":
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise ValueError(
            f"encryption needs the library cryptography: {pip_install('journal')}"
        ) from None
    return AESGCM(key)
