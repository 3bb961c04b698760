"""GGUF files of metadata alone, written byte by byte: what reads them needs neither package."""

import struct
from collections.abc import Mapping
from pathlib import Path

_KINDS = {bool: 7, int: 5, float: 6, str: 8}
_LAYOUTS = {7: "<?", 5: "<i", 6: "<f"}
_ARRAY = 9


def write_gguf(path: Path, metadata: Mapping[str, object], version: int = 3) -> Path:
    """A file without tensors. Values are bools, int32, float32, strings, or lists of those."""
    head = struct.pack("<4sIQQ", b"GGUF", version, 0, len(metadata))
    body = b"".join(_text(key) + _value(value) for key, value in metadata.items())
    path.write_bytes(head + body)
    return path


def _value(value: object) -> bytes:
    if not isinstance(value, list):
        kind = _KINDS[type(value)]
        return struct.pack("<I", kind) + _plain(kind, value)
    kind = _KINDS[type(value[0])]
    return struct.pack("<IIQ", _ARRAY, kind, len(value)) + b"".join(
        _plain(kind, one) for one in value
    )


def _plain(kind: int, value: object) -> bytes:
    return _text(str(value)) if kind == 8 else struct.pack(_LAYOUTS[kind], value)


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data
