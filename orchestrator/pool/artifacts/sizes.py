"""Sizes for people."""

import re

_UNITS = ("B", "kB", "MB", "GB", "TB")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def size(count: int) -> str:
    """``4.4 GB``, in powers of 1000 as disks are sold."""
    value = float(count)
    for unit in _UNITS:
        if value < 1000 or unit == _UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("the last unit takes everything")


def read_size(text: str) -> int:
    """Bytes of ``200GB`` or ``64 MiB``. Raises ``ValueError`` that says what was expected."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"expected a size such as 200GB or 64MiB, got {text!r}")
    power = " kmgt".index(found[2].lower()) if found[2] else 0
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)
