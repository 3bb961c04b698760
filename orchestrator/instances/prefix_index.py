"""Tracks which instances hold which KV blocks, from their KV reports (OR-9).

Each block hash maps to the set of instances that hold it, as bits of an integer: one walk along a
task's hashes finds the longest cached prefix on *all* instances, for any number of them. A hash
covers its whole prefix and its salt (``protocol.block_hashes``), so hashes of different models,
tokenizers or tenants never collide.
"""

from collections.abc import Mapping, Sequence

from protocol import KvReport

MAX_HASHES = 32_768
"""Maximum number of hashes per instance; oldest dropped. Half a million tokens in blocks of 16."""


class PrefixIndex:
    """Block hashes by instance. A missing hash only costs an unexpected prefill."""

    def __init__(self, max_hashes: int = MAX_HASHES) -> None:
        self._max_hashes = max_hashes
        self._holders: dict[bytes, int] = {}
        self._held: dict[str, dict[bytes, None]] = {}
        self._bits: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._holders)

    def count(self, instance: str) -> int:
        return len(self._held.get(instance, ()))

    def apply(self, instance: str, report: KvReport) -> None:
        if report.full:
            self.remove(instance)
        held = self._held.get(instance)
        if held is None:
            held = self._held[instance] = {}
            self._bits[instance] = self._free_bit()
        bit = self._bits[instance]
        for block_hash in report.evicted:
            if block_hash in held:
                del held[block_hash]
                self._drop(block_hash, bit)
        for block_hash in report.added:
            held[block_hash] = None
            self._holders[block_hash] = self._holders.get(block_hash, 0) | bit
        while len(held) > self._max_hashes:
            oldest = next(iter(held))
            del held[oldest]
            self._drop(oldest, bit)

    def remove(self, instance: str) -> None:
        bit = self._bits.pop(instance, 0)
        for block_hash in self._held.pop(instance, ()):
            self._drop(block_hash, bit)

    def longest(self, hashes: Sequence[bytes]) -> Mapping[str, int]:
        """The number of leading ``hashes`` of each instance with any. One lookup per held hash."""
        holders = self._holders
        left = holders.get(hashes[0], 0) if hashes else 0
        if not left:
            return {}
        depths: dict[int, int] = {}
        for depth, block_hash in enumerate(hashes):
            still = left & holders.get(block_hash, 0)
            if still != left:
                depths[left & ~still] = depth
                left = still
                if not left:
                    break
        if left:
            depths[left] = len(hashes)
        found = {}
        for instance, bit in self._bits.items():
            for bits, depth in depths.items():
                if bits & bit:
                    found[instance] = depth
        return found

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless both directions agree."""
        holders: dict[bytes, int] = {}
        for instance, held in self._held.items():
            assert len(held) <= self._max_hashes
            for block_hash in held:
                holders[block_hash] = holders.get(block_hash, 0) | self._bits[instance]
        assert holders == self._holders
        assert len(set(self._bits.values())) == len(self._bits) == len(self._held)

    def _drop(self, block_hash: bytes, bit: int) -> None:
        left = self._holders[block_hash] & ~bit
        if left:
            self._holders[block_hash] = left
        else:
            del self._holders[block_hash]

    def _free_bit(self) -> int:
        used = sum(self._bits.values())
        return ~used & (used + 1)
