"""Text and paths in Triton's Python stub, which assumes ASCII.

The stub starts Python in isolated mode, which ignores ``PYTHONUTF8`` and the environment's locale.
File names stay ASCII: a path with other letters contains lone surrogates instead (PEP 383), which
the system accepts unchanged but no message can contain. Everything else can be repaired.
"""

import locale
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path

_LOCALES = ("C.UTF-8", "C.utf8", "en_US.UTF-8")


def speak_utf8() -> None:
    """Make UTF-8 the encoding of logs and of files opened without an explicit encoding."""
    for name in _LOCALES:
        with suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, name)
            break
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def openable(path: Path, encoding: str = sys.getfilesystemencoding()) -> Path:
    """``path`` in the form that this interpreter can open, from a message or from the system."""
    return Path(str(path).encode("utf-8", "surrogateescape").decode(encoding, "surrogateescape"))


def readable(text: str) -> str:
    """``text``, from a path or the environment, as valid Unicode for users and messages."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
