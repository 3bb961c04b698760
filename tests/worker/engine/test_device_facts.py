"""What a card tells of the GPU beneath an engine."""

import pytest

from worker.engine.device_facts import DeviceFacts, device_facts, mask_of


@pytest.mark.parametrize(
    ("index", "visible", "mask"),
    [(0, None, 1), (2, None, 4), (0, "3", 8), (1, "5, 1", 2), (0, "GPU-12ab", 0), (1, "0", 0)],
)
def test_a_gpu_is_named_by_its_place_in_its_host(
    index: int, visible: str | None, mask: int
) -> None:
    assert mask_of(index, visible) == mask


def test_without_a_gpu_there_is_nothing_to_tell() -> None:
    assert device_facts("cpu") == DeviceFacts(0, "", 0)
