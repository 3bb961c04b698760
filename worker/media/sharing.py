"""How clips share a machine with a text model: text goes first, and each has its own memory.

- CPU: threads that render or encode run at a lower priority (``nice``); those that answer do not.
- GPU: Triton runs each model in a process of its own, between which a GPU takes turns by itself;
  what is fixed is the memory, by a cap on this process's allocator.
"""

import os
import threading
from contextlib import suppress

import torch


def lower_priority(nice: int) -> None:
    """Of this thread, and of those that it starts (as torch's for one operation). Never raised."""
    thread = threading.get_native_id()
    with suppress(OSError):  # a container may forbid it
        if nice > os.getpriority(os.PRIO_PROCESS, thread):
            os.setpriority(os.PRIO_PROCESS, thread, nice)


def cap_memory(device: torch.device, hard_bytes: int) -> None:
    """Have torch refuse what is beyond ``hard_bytes`` of a GPU, between two looks at the limit too;
    0: no cap."""
    if device.type != "cuda" or not hard_bytes:
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, hard_bytes / total), device)
