"""Formats sizes for people."""

_UNITS = ("B", "kB", "MB", "GB", "TB")


def size(count: int) -> str:
    """``count`` bytes as text, such as ``4.4 GB``, in powers of 1000 as disks are sold."""
    value = float(count)
    for unit in _UNITS:
        if value < 1000 or unit == _UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("the last unit takes everything")
