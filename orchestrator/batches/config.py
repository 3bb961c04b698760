"""What an operator may set of batches."""

from dataclasses import dataclass
from pathlib import Path

MOST_WINDOW_S = 7 * 86_400.0
"""The longest ``completion_window``."""
MOST_FILES_PER_KEY = 10_000
MOST_BATCHES_PER_KEY = 10_000
"""Over or not."""
MOST_UNFINISHED_PER_KEY = 100


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """Sizes in bytes, times in seconds."""

    folder: Path
    window: int = 32
    """Lines of all batches that are under way at once."""
    max_lines: int = 100_000
    """Of one batch."""
    line_bytes: int = 4 * 2**20
    file_bytes: int = 256 * 2**20
    folder_bytes: int = 4 * 2**30
    """Of all files together."""
    keep_s: float = 7 * 86_400.0
    """A file is kept so long after it was made, a batch and its results after its end."""
    attempts: int = 3
    """A line that each instance was lost with is sent out so often."""
