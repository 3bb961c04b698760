"""Gives vLLM's prefix cache our names for KV blocks, so that orchestrators place requests by it.

vLLM names a block by its request's hash. With our hashes (``protocol``), its events say which
blocks it holds; they are read in the process, in place of vLLM's publisher.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from protocol import Adapter, KvReport
from protocol.blocks import adapter_salt, hash_block, prefix_salt, root_hash
from worker.engine.kv_events import KvEvents

BlockHasher = Callable[..., list[bytes]]
"""A function of a vLLM ``Request`` that names its full blocks which have no name yet, and of its
prompt for that purpose (``keyed``), where it has images."""


def block_hasher(
    block_tokens: int, hash_salt: bytes, adapters: Iterable[Adapter] = ()
) -> BlockHasher:
    """Make the function for a model and its adapters."""
    salts = {one.name: adapter_salt(hash_salt, one.digest) for one in adapters}

    def hash_new_blocks(request: Any, keyed: Sequence[int] = ()) -> list[bytes]:
        named = len(request.block_hashes)
        full = request.num_tokens // block_tokens
        if full <= named:
            return []
        if named:
            parent = request.block_hashes[-1]
        else:
            adapter = request.lora_request
            salt = hash_salt if adapter is None else salts[adapter.lora_name]
            parent = root_hash(prefix_salt(salt, request.cache_salt or ""))
        found = []
        for index in range(named, full):
            start, end = index * block_tokens, (index + 1) * block_tokens
            rest = request.all_token_ids[max(start, len(keyed)) : end]
            parent = hash_block(parent, [*keyed[start:end], *rest])
            found.append(parent)
        return found

    return hash_new_blocks


def keep_names_plain(config: Any) -> None:
    """Make a ``VllmConfig`` name its blocks by the tokens up to their ends.

    From 0.33 on, with a draft model that reads ahead (EAGLE, MTP), a name covers the tokens after
    the block too, on which the draft model's KV depends: under ours it would read that of others.
    Switched off, vLLM computes the last block found once more. Raises ``ValueError``.
    """
    if getattr(config, "num_hash_lookahead_tokens", 0):
        config.speculative_config.disable_lookahead_block_hashes = True
        if config.num_hash_lookahead_tokens:
            raise ValueError(
                "this vLLM names KV blocks by the tokens after them, too; set"
                " TIDEGATE_WORKER__KV__PREFIX_CACHE=false, or use no draft model that reads ahead"
            )


class PrefixReports(KvEvents):
    """Replaces vLLM's event publisher. ``publish`` is for the engine's thread, ``take`` for one
    reader on any thread.

    Events name the blocks to check. The cache itself is asked whether it holds a block, because it
    may hold one in several places.
    """

    def __init__(self, holds: Callable[[bytes], bool]) -> None:
        super().__init__()
        self._holds = holds
        self._held: dict[bytes, None] = {}

    def publish(self, batch: Any) -> None:
        """Queue a report of the changes in ``batch``, a ``KVEventBatch``."""
        touched: dict[bytes, None] = {}
        for event in batch.events:
            hashes: Iterable[bytes] | None = getattr(event, "block_hashes", None)
            if hashes is None:  # all were cleared
                hashes = self._held
            touched.update(dict.fromkeys(hashes))
        added = [one for one in touched if one not in self._held and self._holds(one)]
        evicted = [one for one in touched if one in self._held and not self._holds(one)]
        for one in evicted:
            del self._held[one]
        self._held.update(dict.fromkeys(added))
        if added or evicted:
            self.add(KvReport(added, evicted))

    def shutdown(self) -> None:
        """Do nothing; vLLM calls this to end its publishers."""

    def get_publisher_config(self) -> None:
        """Return None: there are no subscribers."""
