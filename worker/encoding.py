"""Text and paths in Triton's Python stub, which assumes ASCII.

It starts isolated, so that neither ``PYTHONUTF8`` nor the environment's locale counts. File names
stay ASCII: a path with other letters has lone surrogates in their place (PEP 383), which the system
takes back unchanged and no message can carry. Everything else can be repaired.
"""

import locale
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path

_LOCALES = ("C.UTF-8", "C.utf8", "en_US.UTF-8")


def speak_utf8() -> None:
    """Make UTF-8 the encoding of logs and of files that are opened without an encoding."""
    for name in _LOCALES:
        with suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, name)
            break
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def openable(path: Path, encoding: str = sys.getfilesystemencoding()) -> Path:
    """``path`` as this interpreter can open it, whether it came in a message or from the system."""
    return Path(str(path).encode("utf-8", "surrogateescape").decode(encoding, "surrogateescape"))


def readable(text: str) -> str:
    """``text``, from a path or the environment, as valid Unicode for people and messages."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
