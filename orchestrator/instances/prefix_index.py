"""Which instance holds which KV blocks, as their cache reports tell (OR-9).

Every block's name maps to the set of instances that hold it, as bits of an integer: the longest
cached prefix on *all* instances is then one walk along a task's names, however many there are.
A name fixes its whole prefix and its salt (``worker.protocol.block_hashes``), so names of other
models, tokenizers or tenants never meet.
"""

from collections.abc import Mapping, Sequence

from worker.protocol import KvReport

MOST_NAMES = 32_768
"""Names kept of one instance; the oldest go. Half a million tokens in blocks of 16."""


class PrefixIndex:
    """Names held, by instance. A name that is missing costs a prefill that was not expected to be
    one, nothing else.
    """

    def __init__(self, most_names: int = MOST_NAMES) -> None:
        self._most_names = most_names
        self._holders: dict[bytes, int] = {}
        self._held: dict[str, dict[bytes, None]] = {}
        self._bits: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._holders)

    def count(self, instance: str) -> int:
        """How many names are known of an instance."""
        return len(self._held.get(instance, ()))

    def apply(self, instance: str, report: KvReport) -> None:
        """Take in what an instance tells."""
        if report.full:
            self.forget(instance)
        held = self._held.get(instance)
        if held is None:
            held = self._held[instance] = {}
            self._bits[instance] = self._free_bit()
        bit = self._bits[instance]
        for name in report.evicted:
            if name in held:
                del held[name]
                self._drop(name, bit)
        for name in report.added:
            held[name] = None
            self._holders[name] = self._holders.get(name, 0) | bit
        while len(held) > self._most_names:
            oldest = next(iter(held))
            del held[oldest]
            self._drop(oldest, bit)

    def forget(self, instance: str) -> None:
        """Nothing is known of an instance any more. Fine for one that never told anything."""
        bit = self._bits.pop(instance, 0)
        for name in self._held.pop(instance, ()):
            self._drop(name, bit)

    def longest(self, names: Sequence[bytes]) -> Mapping[str, int]:
        """How many of ``names``, from the first on, each instance holds; those without are left
        out. One dictionary look-up per name that anybody holds.
        """
        holders = self._holders
        left = holders.get(names[0], 0) if names else 0
        if not left:
            return {}
        depths: dict[int, int] = {}
        for depth, name in enumerate(names):
            still = left & holders.get(name, 0)
            if still != left:
                depths[left & ~still] = depth
                left = still
                if not left:
                    break
        if left:
            depths[left] = len(names)
        found = {}
        for instance, bit in self._bits.items():
            for bits, depth in depths.items():
                if bits & bit:
                    found[instance] = depth
        return found

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless both directions tell the same."""
        holders: dict[bytes, int] = {}
        for instance, held in self._held.items():
            assert len(held) <= self._most_names
            for name in held:
                holders[name] = holders.get(name, 0) | self._bits[instance]
        assert holders == self._holders
        assert len(set(self._bits.values())) == len(self._bits) == len(self._held)

    def _drop(self, name: bytes, bit: int) -> None:
        left = self._holders[name] & ~bit
        if left:
            self._holders[name] = left
        else:
            del self._holders[name]

    def _free_bit(self) -> int:
        used = sum(self._bits.values())
        return ~used & (used + 1)
