"""Restricts Triton's shared memory, in which prompts and answers travel, to its owner.

The Python backend makes its region readable for all users, despite the umask (boost sets the mode
after making it).
"""

import os
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = "/dev/shm/"
_FOR_OTHERS = 0o077


def restrict_shared_memory(
    maps: Path = Path("/proc/self/maps"), directory: str = SHARED_MEMORY
) -> None:
    """Remove others' permissions from every shared region that this process has mapped."""
    with suppress(OSError):
        # address, permissions, offset, device, inode, path
        mapped = (line.split(maxsplit=5) for line in maps.read_text(errors="replace").splitlines())
        for region in {line[5] for line in mapped if len(line) > 5}:
            if not region.startswith(directory):
                continue
            with suppress(OSError):  # gone, or another user's
                mode = os.stat(region).st_mode & 0o777
                if mode & _FOR_OTHERS:
                    os.chmod(region, mode & ~_FOR_OTHERS)
