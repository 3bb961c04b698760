"""Facts about an engine's GPU, for its card."""

import os
from typing import NamedTuple


class DeviceFacts(NamedTuple):
    """Facts about a GPU; see the fields of ``ModelCard`` that have these names."""

    vram_bytes: int = 0
    compute_capability: str = ""
    device_mask: int = 0


def device_facts(device: str) -> DeviceFacts:
    """Facts about the process's current GPU for ``cuda…``; zeros and "" for any other device."""
    if not device.startswith("cuda"):
        return DeviceFacts()
    import torch  # engines without a GPU may do without it

    if not torch.cuda.is_available():
        return DeviceFacts()
    index = torch.cuda.current_device()
    major, minor = torch.cuda.get_device_capability(index)
    return DeviceFacts(
        vram_bytes=torch.cuda.get_device_properties(index).total_memory,
        compute_capability=f"{major}.{minor}",
        device_mask=mask_of(index, os.environ.get("CUDA_VISIBLE_DEVICES")),
    )


def mask_of(index: int, visible: str | None) -> int:
    """The bit of a GPU that is number ``index`` among those of ``CUDA_VISIBLE_DEVICES``.

    0 where that names the GPU by its UUID: its number on the host is not known then.
    """
    if visible is None:
        return 1 << index
    names = [name.strip() for name in visible.split(",")]
    named = names[index] if index < len(names) else ""
    return 1 << int(named) if named.isascii() and named.isdigit() and int(named) < 64 else 0
