"""Lets clips share a GPU with a text model: Triton runs each model in a process of its own, between
which the GPU takes turns by itself; memory is divided by a cap on each one's allocator.
"""

import torch


def cap_memory(device: torch.device, hard_bytes: int) -> None:
    """Have torch refuse to allocate more than ``hard_bytes`` of a GPU, even between two checks of
    the limit; 0: no cap."""
    if device.type != "cuda" or not hard_bytes:
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, hard_bytes / total), device)
