"""What fits on a multiprocessor, by the rules of CUDA's occupancy calculator."""

import pytest

from perf.engine.occupancy import KernelUsage


@pytest.mark.parametrize(
    ("registers", "warps", "shared_kib", "programs"),
    [
        (32, 4, 0, 16),  # all 64 warps
        (128, 4, 0, 4),
        (129, 4, 0, 3),  # a warp's registers come in units of 256
        (168, 4, 0, 3),
        (255, 8, 0, 1),
        (16, 1, 0, 32),  # no more programs than that
        (32, 4, 100, 2),
        (32, 4, 113, 2),  # each program takes a KiB besides
        (32, 4, 114, 1),
    ],
)
def test_programs_at_once(registers: int, warps: int, shared_kib: int, programs: int) -> None:
    usage = KernelUsage("attend", "", warps, registers, 0, shared_kib * 1024)
    assert usage.programs == programs
