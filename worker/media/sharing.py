"""How clips share a GPU with a text model: Triton runs each model in a process of its own, between
which the GPU takes turns by itself; what is fixed is the memory, by a cap on each one's allocator.
"""

import torch


def cap_memory(device: torch.device, hard_bytes: int) -> None:
    """Have torch refuse what is beyond ``hard_bytes`` of a GPU, between two looks at the limit too;
    0: no cap."""
    if device.type != "cuda" or not hard_bytes:
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, hard_bytes / total), device)
