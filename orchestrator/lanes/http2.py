"""Implements the little of HTTP/2 (RFC 9113) that one gRPC call on its own connection needs."""

import struct
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD = struct.Struct(">IBI")
"""A frame's head: length (24 bits) and type (8), flags, stream."""
HEAD_BYTES = HEAD.size
DEFAULT_WINDOW = 65_535
DEFAULT_FRAME_BYTES = 16_384
MAX_WINDOW = 2**31 - 1
MAX_FRAME_BYTES = 2**24 - 1
MAX_STREAM = 2**31 - 1
_SETTING = struct.Struct(">HI")
_NUMBER = struct.Struct(">I")


class FrameType(IntEnum):
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
    """Flags of frames; ``ACK`` and ``END_STREAM`` share a bit."""

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
_ERRORS = (
    "no error",
    "protocol error",
    "internal error",
    "flow control error",
    "settings timeout",
    "stream closed",
    "frame size error",
    "refused stream",
    "cancel",
    "compression error",
    "connect error",
    "enhance your calm",
    "inadequate security",
    "HTTP/1.1 required",
)
_OF_THE_CONNECTION = (FrameType.SETTINGS, FrameType.PING, FrameType.GOAWAY)
_OF_A_STREAM = (
    FrameType.DATA,
    FrameType.HEADERS,
    FrameType.RST_STREAM,
    FrameType.PUSH_PROMISE,
    FrameType.CONTINUATION,
)
_SIZES: dict[int, int] = {FrameType.RST_STREAM: 4, FrameType.PING: 8, FrameType.WINDOW_UPDATE: 4}


class Http2Error(ValueError):
    """Data from the peer that breaks HTTP/2."""


def frame(kind: FrameType, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return HEAD.pack(len(payload) << 8 | kind, flags, stream) + payload


def settings(values: dict[Setting, int]) -> bytes:
    payload = b"".join(_SETTING.pack(name, value) for name, value in values.items())
    return frame(FrameType.SETTINGS, 0, 0, payload)


def window_update(stream: int, count: int) -> bytes:
    return frame(FrameType.WINDOW_UPDATE, 0, stream, _NUMBER.pack(count))


def reset(stream: int, code: int) -> bytes:
    return frame(FrameType.RST_STREAM, 0, stream, _NUMBER.pack(code))


def error_name(code: int) -> str:
    """A peer's error code in words."""
    return _ERRORS[code] if code < len(_ERRORS) else f"error {code}"


def check_frame(kind: int, stream: int, size: int, own_stream: int) -> None:
    """Check that a frame may come on ``stream``, if ``own_stream`` is the only one that was opened.

    Raises ``Http2Error``.
    """
    if kind in _OF_THE_CONNECTION and stream:
        raise Http2Error(f"{FrameType(kind).name} on stream {stream}, where it has no place")
    if kind in _OF_A_STREAM and stream != own_stream:
        raise Http2Error(f"{FrameType(kind).name} on stream {stream}, which is not open")
    if kind == FrameType.WINDOW_UPDATE and stream not in (0, own_stream):
        raise Http2Error(f"WINDOW_UPDATE for stream {stream}, which is not open")
    if kind in _SIZES and size != _SIZES[kind]:
        raise Http2Error(f"{FrameType(kind).name} of {size} bytes instead of {_SIZES[kind]}")


def widened(window: int, count: int) -> int:
    """The window after a peer makes room for ``count`` more bytes. Raises ``Http2Error``."""
    if window + count > MAX_WINDOW:
        raise Http2Error(f"a flow control window of {window + count} bytes, {MAX_WINDOW} at most")
    return window + count


def read_settings(payload: bytes) -> dict[int, int]:
    """The values of a SETTINGS payload, by setting. Raises ``Http2Error``."""
    if len(payload) % _SETTING.size:
        raise Http2Error(f"SETTINGS of {len(payload)} bytes")
    values = dict(_SETTING.iter_unpack(payload))
    widened(0, values.get(Setting.INITIAL_WINDOW_SIZE, 0))
    frame_bytes = values.get(Setting.MAX_FRAME_SIZE, DEFAULT_FRAME_BYTES)
    if not DEFAULT_FRAME_BYTES <= frame_bytes <= MAX_FRAME_BYTES:
        raise Http2Error(f"SETTINGS allow frames of {frame_bytes} bytes")
    return values


def read_number(payload: bytes, at: int = 0) -> int:
    """The 31-bit number at ``at``. Raises ``Http2Error``."""
    if len(payload) < at + _NUMBER.size:
        raise Http2Error(f"a control frame of {len(payload)} bytes")
    return int(_NUMBER.unpack_from(payload, at)[0]) & MAX_WINDOW


def unpadded(payload: bytes, flags: int) -> bytes:
    """The payload of DATA or HEADERS without padding and priority. Raises ``Http2Error``."""
    start, stop = 0, len(payload)
    if flags & Flag.PADDED:
        start, stop = 1, stop - (payload[0] if payload else 1)
    if flags & Flag.PRIORITY:
        start += 5
    if start > stop:
        raise Http2Error("padding longer than its frame")
    return payload[start:stop]
