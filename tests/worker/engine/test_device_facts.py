"""What a card tells of the GPU beneath an engine."""

import pytest

from tests.support.cases import for_each
from worker.engine.card import DeviceFacts, device_facts, mask_of


@for_each(
    ("index", "visible", "mask"),
    [(0, None, 1), (2, None, 4), (0, "3", 8), (1, "5, 1", 2), (0, "GPU-12ab", 0), (1, "0", 0)],
)
def test_a_gpu_is_named_by_its_place_in_its_host(
    index: int, visible: str | None, mask: int
) -> None:
    assert mask_of(index, visible) == mask


def test_several_gpus_are_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    class Properties:
        total_memory = 5

    capabilities = [(9, 0), (8, 9), (7, 0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties())
    for visible, mask in (("3,1,0", 0b1010), ("GPU-12ab,1", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert device_facts("cuda:0,1", 2) == DeviceFacts(10, "8.9", mask)
