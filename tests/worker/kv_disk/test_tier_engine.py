"""Engine, overlap and disk tier together: steps run late, files break."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from protocol import OnDeadline
from tests.support.disk_tier import SMALL, ByHand, make_store
from tests.support.fake_device import FakeDevice, continuation
from tests.worker.engine.test_overlap import BLOCK_TOKENS, Bench, OverlapMachine
from worker.core import Event
from worker.kv_disk.base import BlockTier
from worker.kv_disk.block_file import Bytes
from worker.kv_disk.disk_tier import DiskTier

DISK_BLOCKS = 30


class DeviceMemory:
    """``KVMemory`` over the texts of a ``FakeDevice``: a file holds a number for each block."""

    format = SMALL

    def __init__(self, device: FakeDevice, known: list[list[object]]) -> None:
        self._device = device
        self._known = known

    def staging(self, blocks: int) -> Bytes:
        return np.zeros((min(blocks, 3), SMALL.block_bytes), np.uint8)

    def copy_out(self, blocks: Sequence[int], staging: Bytes) -> None:
        for row, block in enumerate(blocks):
            cells = self._device.cells
            self._known.append([cells.get((block, i)) for i in range(BLOCK_TOKENS)])
            number = (len(self._known) - 1).to_bytes(16, "little")
            staging[row] = np.frombuffer(number, np.uint8)

    def copy_in(self, staging: Bytes, blocks: Sequence[int]) -> None:
        for row, block in enumerate(blocks):
            texts = self._known[int.from_bytes(staging[row].tobytes(), "little")]
            for offset, text in enumerate(texts):
                self._device.cells[block, offset] = text  # type: ignore[assignment]


class DiskBench(Bench):
    """A bench whose engine has a disk beneath it; its threads are run by hand."""

    def __init__(self, root: Path, known: list[list[object]], **options: Any) -> None:
        self.root, self.known = root, known
        super().__init__(**options)

    def make_tier(self) -> BlockTier:
        self.loading, self.saving = ByHand(), ByHand()
        store = make_store(self.root, DISK_BLOCKS)
        memory = DeviceMemory(self.device, self.known)
        self.tier = DiskTier(self.scheduler, store, memory, self.loading, self.saving)
        return self.tier

    def finish(self) -> list[Event]:
        events = self.step()
        while self.scheduler.has_work or self.device.uncollected or self._disk_is_busy:
            self.loading.run()
            self.saving.run()
            events += self.step()
        return events

    @property
    def _disk_is_busy(self) -> bool:
        return bool(self.loading.tasks or self.saving.tasks or self.tier._results)


class DiskMachine(OverlapMachine):
    """As ``OverlapMachine``, and load, save, spill, evict, break files and restart in between."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory(prefix="tidegate-kv-")
        self.known: list[list[object]] = []
        self.build()

    def build(self) -> None:
        limits = {"max_running": 3, "max_waiting": 8, "max_step_tokens": 9}
        root = Path(self.directory.name)
        self.disk = DiskBench(root, self.known, blocks=20, step_s=0.01, limits=limits)
        self.bench = self.disk

    @rule(
        which=st.integers(0, 2),
        answered=st.integers(0, 12),
        max_tokens=st.integers(1, 9),
        is_cold=st.booleans(),
    )
    def talk_on(self, which: int, answered: int, max_tokens: int, is_cold: bool) -> None:
        """One of three conversations, at some point of it; perhaps when it has left memory."""
        prompt = [20 + which] * (12 + 3 * which)
        if is_cold:
            for job in self.alive:
                self.bench.engine.resume(job)
            self.note(self.disk.finish())
            self.evict()
        prompt += continuation(prompt, answered, ignore_eos=True)
        self.submit(prompt, max_tokens, 1e6, OnDeadline.ERROR, True)

    @precondition(lambda self: self.disk.loading.tasks)
    @rule()
    def load(self) -> None:
        self.disk.loading.run_one()

    @precondition(lambda self: self.disk.saving.tasks)
    @rule()
    def save(self) -> None:
        self.disk.saving.run_one()

    @rule()
    def evict(self) -> None:
        self.bench.scheduler.pool.forget()

    @rule(data=st.data())
    def break_a_file(self, data: st.DataObject) -> None:
        files = sorted(Path(self.directory.name).glob("blocks/*/*"))
        if files:
            data.draw(st.sampled_from(files)).write_bytes(b"x" * SMALL.file_bytes)

    @rule()
    def restart(self) -> None:
        self.bench.device.fail_next_launch = self.bench.device.fail_next_collect = False
        events: list[Event] = []
        self.bench.engine._sink = events.extend
        self.bench.engine.stop()
        self.note(events)
        assert not self.alive
        self.standing = []
        self.bench.scheduler.check_integrity()
        assert self.bench.scheduler.pool.used_count == 0
        self.build()

    def teardown(self) -> None:
        super().teardown()
        self.restart()
        self.directory.cleanup()


TestDiskOverlap = DiskMachine.TestCase
TestDiskOverlap.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
