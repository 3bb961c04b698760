"""Facts about an engine's GPUs, for its card."""

import os
from typing import NamedTuple


class DeviceFacts(NamedTuple):
    """Facts about GPUs; see the fields of ``ModelCard`` that have these names."""

    vram_bytes: int = 0
    compute_capability: str = ""
    device_mask: int = 0


def device_facts(device: str, count: int = 1) -> DeviceFacts:
    """Facts about the process's current GPU for ``cuda…``, and about those after it where
    ``count`` are used together; zeros and "" for any other device."""
    if not device.startswith("cuda"):
        return DeviceFacts()
    import torch  # engines without a GPU may do without it

    if not torch.cuda.is_available():
        return DeviceFacts()
    first = torch.cuda.current_device()
    used = range(first, first + count)
    major, minor = min(torch.cuda.get_device_capability(index) for index in used)
    masks = [mask_of(index, os.environ.get("CUDA_VISIBLE_DEVICES")) for index in used]
    return DeviceFacts(
        vram_bytes=sum(torch.cuda.get_device_properties(index).total_memory for index in used),
        compute_capability=f"{major}.{minor}",
        device_mask=sum(masks) if all(masks) else 0,
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
