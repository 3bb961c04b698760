"""The little of HTTP/2 (RFC 9113) that one gRPC call on a connection of its own needs."""

import struct
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD = struct.Struct(">IBI")
"""A frame's head: length (24 bits) and type (8), flags, stream."""
HEAD_BYTES = HEAD.size
DEFAULT_WINDOW = 65_535
DEFAULT_FRAME_BYTES = 16_384
MAX_WINDOW = 2**31 - 1
_SETTING = struct.Struct(">HI")
_NUMBER = struct.Struct(">I")


class Kind(IntEnum):
    """Types of frames."""

    DATA = 0
    HEADERS = 1
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Flag(IntEnum):
    """Of frames; ``ACK`` and ``END_STREAM`` share a bit."""

    ACK = 0x1
    END_STREAM = 0x1
    END_HEADERS = 0x4
    PADDED = 0x8
    PRIORITY = 0x20


class Setting(IntEnum):
    ENABLE_PUSH = 2
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5


CANCEL = 8
"""Error code: the stream is not needed any more."""


class Http2Error(ValueError):
    """What came is not HTTP/2 as it is promised."""


def frame(kind: Kind, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return HEAD.pack(len(payload) << 8 | kind, flags, stream) + payload


def settings(values: dict[Setting, int]) -> bytes:
    payload = b"".join(_SETTING.pack(name, value) for name, value in values.items())
    return frame(Kind.SETTINGS, 0, 0, payload)


def window_update(stream: int, count: int) -> bytes:
    return frame(Kind.WINDOW_UPDATE, 0, stream, _NUMBER.pack(count))


def reset(stream: int, code: int) -> bytes:
    return frame(Kind.RST_STREAM, 0, stream, _NUMBER.pack(code))


def read_settings(payload: bytes) -> dict[int, int]:
    """Values by name. Raises ``Http2Error``."""
    if len(payload) % _SETTING.size:
        raise Http2Error(f"SETTINGS of {len(payload)} bytes")
    return dict(_SETTING.iter_unpack(payload))


def read_number(payload: bytes, at: int = 0) -> int:
    """31 bits. Raises ``Http2Error``."""
    if len(payload) < at + _NUMBER.size:
        raise Http2Error(f"a control frame of {len(payload)} bytes")
    return int(_NUMBER.unpack_from(payload, at)[0]) & MAX_WINDOW


def unpadded(payload: bytes, flags: int) -> bytes:
    """A payload of DATA or HEADERS without padding and priority. Raises ``Http2Error``."""
    start, stop = 0, len(payload)
    if flags & Flag.PADDED:
        start, stop = 1, stop - (payload[0] if payload else 1)
    if flags & Flag.PRIORITY:
        start += 5
    if start > stop:
        raise Http2Error("padding longer than its frame")
    return payload[start:stop]
