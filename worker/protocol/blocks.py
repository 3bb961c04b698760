"""Names of KV blocks: a chained SHA-256 over the token ids, so a name fixes the whole prefix.

Defined once, for the worker's prefix cache and for prefix-aware placement. Only full blocks have
a name: a partly filled one cannot be shared.
"""

import hashlib
from array import array
from collections.abc import Sequence


def block_hashes(token_ids: Sequence[int], block_tokens: int, salt: bytes) -> list[bytes]:
    """Names of the full blocks at the head of ``token_ids``, in order; 32 bytes each.

    ``h[-1] = sha256(salt)``, ``h[i] = sha256(h[i-1] + little-endian uint32 ids of block i)``.
    ``salt`` separates tenants and incompatible models: equal tokens under different salts never
    share a name.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
    ids = array("I", token_ids)
    if ids.itemsize != 4:  # pragma: no cover - no platform that Triton runs on
        raise RuntimeError("this platform's unsigned int is not 32 bits wide")
    parent = hashlib.sha256(salt).digest()
    names = []
    for start in range(0, len(ids) - block_tokens + 1, block_tokens):
        parent = hashlib.sha256(parent + ids[start : start + block_tokens].tobytes()).digest()
        names.append(parent)
    return names
