"""Assembles the disk tier."""

from contextlib import suppress
from pathlib import Path
from threading import Thread

from worker.kv_disk.background import BackgroundThread
from worker.kv_disk.block_store import BlockStore, fingerprint
from worker.kv_disk.copies import KVMemory
from worker.kv_disk.directories import log_others
from worker.kv_disk.disk_tier import DiskTier
from worker.log import model_log
from worker.scheduler.scheduler import Scheduler


def open_disk_tier(
    scheduler: Scheduler, memory: KVMemory, path: Path, most_bytes: int, origin: str
) -> DiskTier:
    """The tier under ``path`` for blocks of this ``origin``, which names what computed them.

    Raises ``ValueError`` when ``path`` cannot be used.
    """
    root = path / fingerprint(origin, memory.format)
    try:
        store = BlockStore(root, memory.format, most_bytes=most_bytes)
    except OSError as error:
        raise ValueError(
            f"TIDEGATE_WORKER__KV__DISK_PATH: {path} cannot be used ({error.strerror}); name a"
            " directory that the worker may write to"
        ) from error
    model_log.info("KV disk %s holds %d blocks for this model", path, len(store))
    loading, saving = BackgroundThread("tidegate-kv-load"), BackgroundThread("tidegate-kv-save")
    # On a thread: there may be a million files to add up, and nothing waits for the sum.
    Thread(target=_log_others, args=(path, root), name="tidegate-kv-list", daemon=True).start()
    return DiskTier(scheduler, store, memory, loading, saving)


def _log_others(path: Path, own: Path) -> None:
    with suppress(OSError):  # a directory was removed while it was measured
        log_others(path, own)
