"""Room before a start, and GPUs that break while instances run on them (PV-2)."""

import asyncio
from pathlib import Path

import pytest

from catalog.errors import StartFailed
from catalog.paths import DEMO_CHECKPOINT
from pool.fleet.gpus import Gpus, need_bytes
from pool.fleet.specs import InstanceSpec, specs_of
from pool.pool_file import parse_pool_file
from pool.preflight.nvml import GpuFault
from pool.preflight.vram import reading
from tests.support.fake_gpus import FakeGpus

ANYWHERE = Path("nowhere")


class Rig:
    def __init__(self, *free: float) -> None:
        self.fake = FakeGpus(*free)
        self.out: list[tuple[str, str]] = []
        now = asyncio.get_running_loop().time
        self.gpus = Gpus(self.fake, 0.01, now, lambda uuid, why: self.out.append((uuid, why)))


def spec(*groups: str, vram_gib: float | None = 10.0) -> InstanceSpec:
    return InstanceSpec(
        "a", "demo", tuple(tuple(group.split(",")) for group in groups), vram_gib=vram_gib
    )


async def test_a_stated_need_is_that_of_each_gpu() -> None:
    rig = Rig(10.0, 10.0, 19.0)
    assert await rig.gpus.take("a", spec("0,1"), ANYWHERE) == ("0", "1")
    with pytest.raises(StartFailed, match=r"it needs 20\.0 GiB on GPU 2, where 19\.0 GiB"):
        await rig.gpus.take("b", spec("2", vram_gib=20.0), ANYWHERE)


def test_kv_blocks_that_the_file_asks_for_are_counted() -> None:
    text = '[[instances]]\nname = "a"\nmodel = "demo"\nsettings.kv.blocks = {}\n'

    def need(blocks: int) -> int:
        (asked,) = specs_of(parse_pool_file(text.format(blocks))).values()
        assert isinstance(asked, InstanceSpec)
        return need_bytes(asked, DEMO_CHECKPOINT)

    assert need(3000) - need(1000) == 2 * (need(2000) - need(1000)) > 0


async def test_what_is_not_stated_is_estimated_from_the_files() -> None:
    rig = Rig(0.1)
    with pytest.raises(StartFailed, match=r"it needs 0\.\d GiB on GPU 0, where 0\.1 GiB"):
        await rig.gpus.take("a", spec("0", vram_gib=None), DEMO_CHECKPOINT)


async def test_the_next_group_is_taken_where_the_first_has_no_room() -> None:
    rig = Rig(5.0, 40.0)
    assert await rig.gpus.take("a", spec("0", "1"), ANYWHERE) == ("1",)


async def test_the_cpu_needs_no_gpu_and_asks_for_none() -> None:
    rig = Rig()
    assert await rig.gpus.take("a", InstanceSpec("a", "demo"), DEMO_CHECKPOINT) == ()
    assert await rig.gpus.fits_beside(InstanceSpec("a", "demo"), DEMO_CHECKPOINT)
    assert rig.fake.looks == 0


async def test_room_beside_is_looked_at_and_not_kept() -> None:
    rig = Rig(15.0)
    for _ in range(2):
        assert await rig.gpus.fits_beside(spec("0"), ANYWHERE)
    assert not await rig.gpus.fits_beside(spec("0", vram_gib=16.0), ANYWHERE)


async def test_a_fault_takes_out_its_gpu_and_its_instance_goes_to_another() -> None:
    rig = Rig(40.0, 40.0)
    group = await rig.gpus.take("a", spec("0", "1"), ANYWHERE)
    losing = asyncio.create_task(rig.gpus.lost(group))
    watching = asyncio.create_task(rig.gpus.watch())
    await asyncio.sleep(0.05)
    rig.fake.pending = [GpuFault("GPU-0", 31)]
    await asyncio.sleep(0.05)
    assert not losing.done(), "a program's own error"
    rig.fake.pending = [GpuFault("GPU-0", 79)]
    assert await losing == "GPU 0 is taken out: the driver reported Xid 79"
    assert rig.out == [("GPU-0", "the driver reported Xid 79")]
    rig.gpus.settle("a")
    assert await rig.gpus.take("a", spec("0", "1"), ANYWHERE) == ("1",)
    watching.cancel()


async def test_a_gpu_that_vanishes_is_noticed_and_without_another_it_waits() -> None:
    rig = Rig(40.0)
    group = await rig.gpus.take("a", spec("0"), ANYWHERE)
    rig.gpus.settle("a")
    losing = asyncio.create_task(rig.gpus.lost(group))
    watching = asyncio.create_task(rig.gpus.watch())
    del rig.fake.free["GPU-0"]
    assert await losing == "GPU 0 has vanished"
    with pytest.raises(StartFailed, match="there is no GPU 0; available: none"):
        await rig.gpus.take("a", spec("0"), ANYWHERE)
    watching.cancel()


async def test_a_driver_that_does_not_answer_ends_nothing() -> None:
    rig = Rig(40.0)
    group = await rig.gpus.take("a", spec("0"), ANYWHERE)
    losing = asyncio.create_task(rig.gpus.lost(group))
    watching = asyncio.create_task(rig.gpus.watch())
    rig.fake.is_there = False
    await asyncio.sleep(0.1)
    assert not losing.done()
    for task in (losing, watching):
        task.cancel()


async def test_a_library_that_cannot_tell_of_faults_leaves_the_watch_for_lost_gpus(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As another version of it, that lacks a call."""

    class Older(FakeGpus):
        def faults(self) -> list[GpuFault]:
            raise AttributeError("nvmlEventSetWait_v2")

    rig = Rig()
    rig.gpus._reader = rig.fake = Older(40.0)
    rig.gpus.ledger._read = reading(rig.fake)
    lost = asyncio.create_task(rig.gpus.lost(("0",)))
    watch = asyncio.create_task(rig.gpus.watch())
    await asyncio.sleep(0.05)
    rig.fake.free.clear()
    async with asyncio.timeout(10):
        assert await lost == "GPU 0 has vanished"
    watch.cancel()
    assert caplog.text.count("faults of GPUs cannot be read") == 1
