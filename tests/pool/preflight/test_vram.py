"""Whether an instance fits on its GPUs, with simulated ones (PV-2)."""

from pool.preflight.need import GIB
from pool.preflight.nvml import GpuDevice, GpuFault
from pool.preflight.vram import VramLedger
from tests.support.clock import ManualClock
from tests.support.fake_gpus import FakeGpus


class Rig:
    def __init__(self, *free: float, heartbeat_s: float = 15.0) -> None:
        self.gpus, self.clock = FakeGpus(*free), ManualClock()

        async def read() -> list[GpuDevice]:
            return self.gpus.devices()

        self.ledger = VramLedger(read, heartbeat_s, self.clock.now)

    async def refusal(self, who: str, group: str, gib: float) -> str:
        return await self.ledger.refusal(who, group.split(","), int(gib * GIB))


async def test_what_does_not_fit_is_refused_with_both_numbers() -> None:
    rig = Rig(20.0)
    assert await rig.refusal("a", "0", 20.0) == ""
    rig.ledger.settle("a")
    assert "it needs 20.5 GiB on GPU 0, where 20.0 GiB of 80.0 GiB are free" in (
        await rig.refusal("a", "0", 20.5)
    )


async def test_of_two_that_start_at_once_the_first_ones_need_is_reserved() -> None:
    rig = Rig(30.0)
    assert await rig.refusal("a", "0", 20.0) == ""
    assert "where 10.0 GiB of 80.0 GiB are free" in await rig.refusal("b", "0", 20.0)
    assert await rig.refusal("a", "0", 20.0) == "", "its own is no obstacle to it"
    rig.gpus.free["GPU-0"] = 9.0
    rig.ledger.settle("a")
    assert "where 9.0 GiB" in await rig.refusal("b", "0", 20.0), "measured from now on"


async def test_a_group_shares_what_is_needed() -> None:
    rig = Rig(20.0, 20.0, 5.0)
    assert await rig.refusal("a", "0,1", 40.0) == ""
    rig.ledger.settle("a")
    assert "on GPU 2" in await rig.refusal("b", "1,2", 12.0)


async def test_an_answer_is_kept_for_one_heartbeat() -> None:
    rig = Rig(20.0, heartbeat_s=4.0)
    for _ in range(3):
        await rig.ledger.devices()
    assert rig.gpus.looks == 1
    rig.clock.advance(4.0)
    await rig.ledger.devices()
    assert rig.gpus.looks == 2
    assert rig.ledger.counts.hit_rate == 0.5


async def test_an_answer_is_never_kept_longer_than_fifteen_seconds() -> None:
    rig = Rig(20.0, heartbeat_s=3600.0)
    await rig.ledger.devices()
    rig.clock.advance(15.0)
    await rig.ledger.devices()
    assert rig.gpus.looks == 2


async def test_what_is_not_there_cannot_be_asked_or_is_out_is_said() -> None:
    rig = Rig(20.0, 20.0)
    assert await rig.refusal("a", "7", 1.0) == "there is no GPU 7; available: 0, 1"
    rig.ledger.take_out("GPU-1", "the driver reported Xid 79")
    assert await rig.refusal("a", "1", 1.0) == "GPU 1 is taken out: the driver reported Xid 79"
    rig.ledger.restore()
    assert await rig.refusal("a", "1", 1.0) == ""
    rig.gpus.is_there = False
    rig.clock.advance(99.0)
    assert "no GPU can be looked at: NVIDIA's" in await rig.refusal("a", "0", 1.0)


async def test_devices_go_by_number_uuid_or_its_beginning_and_are_shown_by_uuid() -> None:
    rig = Rig(20.0, 20.0)
    assert await rig.ledger.visible(("1", "GPU-0")) == "GPU-1,GPU-0"
    assert not GpuDevice("1", "GPU-12", "", 0, 0).is_called("12")


async def test_a_fault_of_a_gpu_takes_out_its_mig_devices() -> None:
    rig = Rig(20.0)
    rig.gpus.free["MIG-a"] = 10.0
    rig.gpus.parts["MIG-a"] = "GPU-9"
    assert await rig.refusal("a", "MIG-a", 1.0) == ""
    rig.ledger.take_out("GPU-9", "Xid 48")
    assert "taken out" in await rig.refusal("a", "MIG-a", 1.0)


def test_a_programs_own_errors_are_not_its_gpus() -> None:
    assert [GpuFault("GPU-0", xid).is_of_device for xid in (13, 31, 48, 79)] == [
        False,
        False,
        True,
        True,
    ]
