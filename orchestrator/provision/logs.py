"""Log files of supervised processes, and the part of one that a person needs."""

import re
from pathlib import Path

_LOAD_FAILED = re.compile(r"failed to load '([^']+)' version \d+: [^:]+: (.*?)\"?$", re.MULTILINE)
_ERROR_LINE = re.compile(r"^(?:E\d{4} \S+ +\d+ [\w.]+:\d+\]|error:) *(.*)$", re.MULTILINE)
_USAGE = re.compile(r"^(.+)\nUsage: ", re.MULTILINE)
_LOCATION = re.compile(r"\n+At:\n.*", re.DOTALL)
_TAIL_BYTES = 64 * 1024


def fresh_log(path: Path) -> None:
    """Make room for a new run's log; the last run's is kept as ``….1``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.replace(path.with_name(path.name + ".1"))


def tail(path: Path, lines: int = 5) -> str:
    """The last ``lines`` lines that are not blank; empty when there is no log."""
    return "\n".join([line for line in _read_tail(path).splitlines() if line.strip()][-lines:])


def why_triton_ended(path: Path) -> str:
    """The useful part of a Triton log: what a model's ``initialize`` raised, else the errors."""
    text = _read_tail(path)
    if load := _LOAD_FAILED.search(text):
        reason = load[2].replace("\\n", "\n").replace('\\"', '"')
        return f"model {load[1]}: {_LOCATION.sub('', reason).strip()}"
    if usage := _USAGE.search(text):
        return usage[1]
    errors = [match[1].strip('" ') for match in _ERROR_LINE.finditer(text)]
    return "\n".join(errors[-3:]) or tail(path)


def _read_tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
