"""A batch's two files on a disk that fails."""

import os
from pathlib import Path
from typing import Any

import pytest

from orchestrator.batches.config import BatchConfig
from orchestrator.batches.folder import Folder, Ledger
from orchestrator.batches.records import StoredBatch, Time
from orchestrator.batches.service import new_batch
from orchestrator.clock import Boot
from tests.support.clock import ManualClock


@pytest.fixture
def batch() -> StoredBatch:
    clock = ManualClock()
    return new_batch(
        Time(clock, Boot("a boot", clock.now)),
        id="batch_1",
        owner="a-key",
        input_id="file-input",
        endpoint="/v1/completions",
        window="24h",
        window_s=86_400.0,
        keep_s=86_400.0,
        metadata={},
    )


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(BatchConfig(tmp_path / "batches"))


def test_no_file_stays_open_when_the_other_cannot_be_opened(
    folder: Folder, batch: StoredBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again and again while the disk is full, so it would run out of files."""
    open_file = os.open

    def full(path: Any, *args: Any) -> int:
        if batch.errors_id in str(path):
            raise OSError(28, "No space left on device")
        return open_file(path, *args)

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        for _ in range(3):
            with pytest.raises(OSError, match="No space"):
                Ledger(folder, batch)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    Ledger(folder, batch).close()
