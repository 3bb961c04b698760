"""Room before a start (PV-2)."""

from pathlib import Path

import pytest

from catalog.errors import StartFailed
from catalog.paths import DEMO_CHECKPOINT
from pool.fleet.gpus import GIB, Gpus
from pool.fleet.specs import InstanceSpec
from pool.preflight.nvml import GpuDevice
from tests.support.cases import for_each
from tests.support.clock import ManualClock
from tests.support.fake_gpus import FakeGpus

ANYWHERE = Path("nowhere")


class Rig:
    def __init__(self, *free: float, heartbeat_s: float = 15.0) -> None:
        self.fake, self.clock = FakeGpus(*free), ManualClock()
        self.gpus = Gpus(self.fake, heartbeat_s, self.clock.now)

    async def refusal(self, who: str, group: str, gib: float) -> str:
        return await self.gpus.refusal(who, group.split(","), int(gib * GIB))


def spec(*groups: str, vram_gib: float | None = 10.0) -> InstanceSpec:
    return InstanceSpec(
        "a", "demo", tuple(tuple(group.split(",")) for group in groups), vram_gib=vram_gib
    )


async def test_a_stated_need_is_that_of_each_gpu_and_an_estimate_is_shared() -> None:
    rig = Rig(10.0, 10.0, 19.0, 0.1)
    assert await rig.gpus.take("a", spec("0,1"), ANYWHERE) == ("0", "1")
    with pytest.raises(StartFailed, match=r"it needs 20\.0 GiB on GPU 2, where 19\.0 GiB of 80"):
        await rig.gpus.take("b", spec("2", vram_gib=20.0), ANYWHERE)
    with pytest.raises(StartFailed, match=r"it needs 0\.\d GiB on GPU 3, where 0\.1 GiB"):
        await rig.gpus.take("c", spec("3", vram_gib=None), DEMO_CHECKPOINT)
    assert await rig.gpus.take("d", spec("3", "2"), ANYWHERE) == ("2",), "the next group"


async def test_the_cpu_needs_no_gpu_and_asks_for_none() -> None:
    rig = Rig()
    assert await rig.gpus.take("a", InstanceSpec("a", "demo"), DEMO_CHECKPOINT) == ()
    assert await rig.gpus.fits_beside(InstanceSpec("a", "demo"), DEMO_CHECKPOINT)
    assert rig.fake.looks == 0


async def test_room_next_to_is_looked_at_and_not_kept() -> None:
    rig = Rig(15.0)
    for _ in range(2):
        assert await rig.gpus.fits_beside(spec("0"), ANYWHERE)
    assert not await rig.gpus.fits_beside(spec("0", vram_gib=16.0), ANYWHERE)


async def test_of_two_that_start_at_once_the_first_ones_need_is_reserved() -> None:
    rig = Rig(30.0)
    assert await rig.refusal("a", "0", 20.0) == ""
    assert "where 10.0 GiB of 80.0 GiB are free" in await rig.refusal("b", "0", 20.0)
    assert await rig.refusal("a", "0", 20.0) == "", "its own is no obstacle to it"
    rig.fake.free["GPU-0"] = 9.0
    rig.gpus.settle("a")
    assert "where 9.0 GiB" in await rig.refusal("b", "0", 20.0), "measured from now on"


@for_each(("heartbeat_s", "kept_s"), [(4.0, 4.0), (3600.0, 15.0)])
async def test_an_answer_is_kept_for_a_heartbeat_and_fifteen_seconds_at_most(
    heartbeat_s: float, kept_s: float
) -> None:
    rig = Rig(20.0, heartbeat_s=heartbeat_s)
    for _ in range(3):
        await rig.gpus.devices()
    assert rig.fake.looks == 1
    rig.clock.advance(kept_s)
    await rig.gpus.devices()
    assert (rig.fake.looks, rig.gpus.hits, rig.gpus.misses) == (2, 2, 2)


async def test_what_is_not_there_or_cannot_be_asked_is_said() -> None:
    rig = Rig(20.0, 20.0)
    assert await rig.refusal("a", "7", 1.0) == "there is no GPU 7; available: 0, 1"
    rig.fake.is_there = False
    rig.clock.advance(99.0)
    assert "no GPU can be looked at: NVIDIA's" in await rig.refusal("a", "0", 1.0)


async def test_devices_go_by_number_uuid_or_its_beginning_and_are_shown_by_uuid() -> None:
    assert await Rig(20.0, 20.0).gpus.visible(("1", "GPU-0")) == "GPU-1,GPU-0"
    assert not GpuDevice("1", "GPU-12", 0, 0).is_called("12")
