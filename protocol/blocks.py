"""Hashes of KV blocks: a chained SHA-256 over token ids, so that one identifies a whole prefix.

Defined once, for the worker's prefix cache and for prefix-aware placement. Only full blocks have
a hash: a partly filled one cannot be shared.
"""

import hashlib
from array import array
from collections.abc import Sequence

_IDS = "I"


def prefix_salt(hash_salt: bytes, cache_salt: str) -> bytes:
    """The salt of one job's hashes: the card's ``hash_salt`` and the job's ``cache_salt``.

    Jobs without a ``cache_salt`` share blocks with each other; jobs with one only with equal salts.
    """
    if not cache_salt:
        return hash_salt
    return hashlib.sha256(hash_salt + b"\0" + cache_salt.encode()).digest()


def adapter_salt(hash_salt: bytes, digest: str) -> bytes:
    """The ``hash_salt`` of prompts for an adapter, whose KV differs from its base model's.
    ``digest`` is the adapter's, empty for the base model itself."""
    return hashlib.sha256(hash_salt + bytes.fromhex(digest)).digest() if digest else hash_salt


def root_hash(salt: bytes) -> bytes:
    """Parent hash of the first block."""
    return hashlib.sha256(salt).digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of the full block ``token_ids`` that follows the block (or root) with hash
    ``parent``."""
    return hashlib.sha256(parent + array(_IDS, token_ids).tobytes()).digest()


def block_hashes(token_ids: Sequence[int], block_tokens: int, salt: bytes) -> list[bytes]:
    """Hashes of the full blocks at the head of ``token_ids``, in order; 32 bytes each.

    ``h[-1] = sha256(salt)``, ``h[i] = sha256(h[i-1] + little-endian uint32 ids of block i)``.
    ``salt`` (see ``prefix_salt``) separates tenants and incompatible models: equal tokens under
    different salts never share a hash. Raises ``OverflowError`` for an id outside 0 … 2**32-1.
    """
    ids = array(_IDS, token_ids).tobytes()
    parent = root_hash(salt)
    hashes = []
    block_bytes = 4 * block_tokens
    for start in range(0, len(ids) - block_bytes + 1, block_bytes):
        parent = hashlib.sha256(parent + ids[start : start + block_bytes]).digest()
        hashes.append(parent)
    return hashes
