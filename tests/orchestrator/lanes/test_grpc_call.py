"""A gRPC call on the event loop: against gRPC's own server, and against peers that misbehave."""

import asyncio
import struct
from collections.abc import Iterable

import pytest
from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.lanes import grpc_call
from orchestrator.lanes.grpc_call import CallEnded, GrpcCall, open_call
from tests.support.cases import for_each
from tests.support.echo import METHOD, Echo

HEAD = struct.Struct(">IBI")
"""A frame's head: length (24 bits) and type (8), flags, stream."""
DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    *(0, 1),
    *range(3, 10),
)
ACK = END_STREAM = 0x1
END_HEADERS = 0x4
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 4, 5
DEFAULT_WINDOW, DEFAULT_FRAME_BYTES, MAX_WINDOW = 65_535, 16_384, 2**31 - 1
MESSAGES = st.lists(st.binary(max_size=300), min_size=1, max_size=8)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return HEAD.pack(len(payload) << 8 | kind, flags, stream) + payload


def settings(values: dict[int, int]) -> bytes:
    payload = b"".join(struct.pack(">HI", name, value) for name, value in values.items())
    return frame(SETTINGS, 0, 0, payload)


def window_update(stream: int, count: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", count))


class Wire(asyncio.Transport):
    """Keeps what a call writes."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.is_aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self.is_aborted = True

    close = abort

    def take(self) -> list[tuple[int, int, int, bytes]]:
        """Kind, flags, stream and payload of each frame since the last call."""
        frames, at = [], 0
        while at < len(self.sent):
            word, flags, stream = HEAD.unpack_from(self.sent, at)
            start = at + HEAD.size
            at = start + (word >> 8)
            frames.append((word & 0xFF, flags, stream, bytes(self.sent[start:at])))
        self.sent.clear()
        return frames


def headers(flags: int = 0, **more: str) -> bytes:
    """The head of an answer as gRPC's own server writes it, or with ``more``."""
    stated = {":status": "200", "content-type": "application/grpc"}
    stated |= {name.replace("_", "-"): value for name, value in more.items()}
    block = Encoder().encode([(name, value) for name, value in stated.items() if value])
    return frame(HEADERS, END_HEADERS | flags, 1, block)


class Rig:
    """A call without a socket, which ``received`` the begin of an answer."""

    def __init__(self, received: bytes = settings({}) + headers()) -> None:
        self.got: list[bytes] = []
        self.together: list[int] = []
        self.leaving = 0
        self.call = GrpcCall("host:1", METHOD, self._take, self._leave)
        self.wire = Wire()
        self.call.connection_made(self.wire)
        preface = self.wire.sent.index(b"SM\r\n\r\n") + 6
        del self.wire.sent[:preface]
        self.receive(received)
        self.wire.take()

    def _take(self, messages: list[bytes]) -> None:
        self.got += messages
        self.together.append(len(messages))

    def _leave(self) -> None:
        self.leaving += 1

    def receive(self, data: bytes) -> None:
        self.call.data_received(data)

    def error(self) -> CallEnded:
        error = self.call.ended.exception()
        assert isinstance(error, CallEnded)
        return error


def message(data: bytes) -> bytes:
    return struct.pack(">BI", 0, len(data)) + data


def data_frames(stream: bytes, size: int) -> Iterable[bytes]:
    return [frame(DATA, 0, 1, stream[at : at + size]) for at in range(0, len(stream), size)]


@given(MESSAGES, st.integers(1, 400), st.integers(1, 500))
def test_messages_come_whole_however_they_were_cut(
    messages: list[bytes], frame_bytes: int, read_bytes: int
) -> None:
    async def run() -> None:
        rig = Rig()
        stream = b"".join(map(message, messages))
        wire = b"".join(data_frames(stream, frame_bytes))
        for at in range(0, len(wire), read_bytes):
            rig.receive(wire[at : at + read_bytes])
        assert rig.got == messages
        assert not rig.call.ended.done()

    asyncio.run(run())


async def test_no_more_is_sent_than_the_peer_has_room_for() -> None:
    rig = Rig()
    data = bytes(3 * DEFAULT_WINDOW)
    rig.call.send(data)

    def sent() -> list[int]:
        return [len(payload) for kind, _, _, payload in rig.wire.take() if kind == DATA]

    first = sent()
    assert sum(first) == DEFAULT_WINDOW
    assert max(first) <= DEFAULT_FRAME_BYTES
    rig.receive(window_update(0, 1000))
    assert sent() == []  # the stream's own window is still shut
    rig.receive(window_update(1, 600))
    assert sent() == [600]
    larger = {INITIAL_WINDOW_SIZE: DEFAULT_WINDOW + 100, MAX_FRAME_SIZE: 70_000}
    rig.receive(settings(larger))
    assert sent() == [100]
    rig.receive(window_update(0, 10**6) + window_update(1, 10**6))
    rest = sent()
    assert sum(rest) == len(message(data)) - DEFAULT_WINDOW - 700
    assert max(rest) > DEFAULT_FRAME_BYTES


async def test_the_peer_is_told_of_room_as_its_data_is_taken() -> None:
    rig = Rig()
    piece = frame(DATA, 0, 1, message(bytes(16_000)))
    room = {0: 0, 1: 0}
    for _ in range(300):
        rig.receive(piece)
    for kind, _, stream, payload in rig.wire.take():
        if kind == WINDOW_UPDATE:
            room[stream] += int.from_bytes(payload, "big")
    assert room[0] == room[1] > 2_000_000


async def test_pings_and_settings_are_answered() -> None:
    rig = Rig()
    rig.receive(frame(PING, 0, 0, b"12345678") + settings({}))
    rig.receive(frame(PING, ACK, 0, b"12345678") + frame(SETTINGS, ACK, 0))
    assert rig.wire.take() == [(PING, ACK, 0, b"12345678"), (SETTINGS, ACK, 0, b"")]


@for_each(
    ("received", "status"),
    [
        (frame(DATA, 0, 1, b"\x01\x00\x00\x00\x01x"), "internal"),
        (frame(SETTINGS, 0, 0, b"xyz"), "internal"),
        (frame(PUSH_PROMISE, 0, 1), "internal"),
        (frame(DATA, END_STREAM, 1), "ok"),
        (frame(RST_STREAM, 0, 1, b"\x00\x00\x00\x08"), "unavailable"),
        (window_update(1, MAX_WINDOW), "unavailable"),
        (frame(GOAWAY, 0, 0, bytes(8) + b"too many"), "unavailable"),
        (headers(END_STREAM), "internal"),
    ],
)
async def test_whatever_a_peer_does_wrong_ends_the_call(received: bytes, status: str) -> None:
    rig = Rig()
    rig.receive(received)
    assert rig.error().status == status
    assert rig.wire.is_aborted


@for_each(
    ("received", "said"),
    [
        (frame(DATA, 0, 3, message(b"x")), "a frame for stream 3, which is not open"),
        (window_update(5, 1), "a frame for stream 5, which is not open"),
        (settings({MAX_FRAME_SIZE: 100}), "Setting 5 has invalid value 100"),
    ],
)
async def test_an_error_of_the_protocol_is_named(received: bytes, said: str) -> None:
    rig = Rig()
    rig.receive(received)
    assert str(rig.error()).startswith(f"internal: not HTTP/2 as expected: {said}")
    assert rig.wire.is_aborted


@for_each(
    ("received", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "unavailable: it speaks HTTP/1; is that the port"),
        (b"\x15\x03\x01\x00\x02\x02\x46 and more", "unavailable: it speaks TLS: set TIDEGATE_"),
        (
            b"SSH-2.0-OpenSSH_9",
            "internal: not HTTP/2 as expected: it begins with b'SSH-2.0-OpenSSH",
        ),
        (frame(PING, 0, 0, bytes(8)), "internal: not HTTP/2 as expected: it begins with"),
        (settings({}) + headers(content_type="text/html"), "unavailable: content type 'text/html'"),
        (settings({}) + headers(**{":status": "503"}), "unavailable: HTTP status 503 instead of"),
        (
            settings({}) + frame(DATA, 0, 1, message(b"x")),
            "internal: not HTTP/2 as expected: cannot receive data before headers",
        ),
        (
            settings({}) + frame(RST_STREAM, 0, 1, b"\x00\x00\x00\x0b"),
            "unavailable: the stream was reset (enhance your calm)",
        ),
    ],
)
async def test_what_is_no_grpc_is_said_so(received: bytes, said: str) -> None:
    assert str(Rig(received).error()).startswith(said)


async def test_an_alert_alone_says_that_it_is_tls() -> None:
    rig = Rig(b"")
    rig.receive(b"\x15\x03\x01\x00\x02\x02\x46")
    rig.call.connection_lost(None)
    assert str(rig.error()) == "unavailable: it speaks TLS: set TIDEGATE_LANES__TLS"


async def test_a_peer_that_leaves_is_told_of_and_may_finish() -> None:
    rig = Rig()
    rig.receive(frame(GOAWAY, 0, 0, struct.pack(">II", 2**31 - 1, 0) + b"max_age"))
    assert rig.leaving == 1 and not rig.call.ended.done()
    rig.receive(frame(DATA, 0, 1, message(b"the rest")))
    assert rig.got == [b"the rest"]
    rig.call.connection_lost(None)
    assert str(rig.error()) == "unavailable: max_age"


async def test_a_message_beyond_the_bound_is_refused_before_it_comes() -> None:
    rig = Rig()
    rig.receive(frame(DATA, 0, 1, struct.pack(">BI", 0, 2**31)))
    assert str(rig.error()).startswith("resource_exhausted: a message of 2147483648 bytes")


async def test_a_peer_that_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_call, "_MAX_UNSENT_BYTES", 1000)
    rig = Rig()
    rig.call.send(bytes(DEFAULT_WINDOW))  # what it has room for is none of it
    assert not rig.call.ended.done()
    rig.call.send(bytes(1000))
    assert str(rig.error()) == "unavailable: it does not read: 1010 bytes are unsent"
    assert rig.wire.is_aborted
    rig.call.send(b"more")
    await rig_closed(rig)


async def rig_closed(rig: Rig) -> None:
    """As its connection is lost."""
    rig.call.connection_lost(None)
    await rig.call.close()


async def test_a_slow_peer_gets_a_cancel_at_once() -> None:
    rig = Rig()
    rig.call.send(bytes(2 * DEFAULT_WINDOW))  # more than it has room for
    rig.wire.take()
    closing = asyncio.create_task(rig.call.close())
    await asyncio.sleep(0)
    rig.call.connection_lost(None)
    await closing
    assert rig.wire.take() == [(RST_STREAM, 0, 1, b"\x00\x00\x00\x08")]


async def test_messages_before_the_end_are_handed_over() -> None:
    rig = Rig()
    trailers = Encoder().encode([("grpc-status", "14"), ("grpc-message", "going%20down")])
    rig.receive(
        frame(DATA, 0, 1, message(b"last"))
        + frame(HEADERS, END_STREAM, 1, trailers[:3])
        + frame(CONTINUATION, END_HEADERS, 1, trailers[3:])
    )
    assert rig.got == [b"last"]
    assert str(rig.error()) == "unavailable: going down"


async def test_what_the_taker_raises_ends_the_call() -> None:
    def refuse(messages: list[bytes]) -> None:
        raise ValueError("not what was promised")

    call, wire = GrpcCall("host:1", METHOD, refuse), Wire()
    call.connection_made(wire)
    data = settings({}) + headers() + frame(DATA, 0, 1, message(b"x"))
    call.data_received(data)
    with pytest.raises(ValueError, match="promised"):
        await call.ended
    assert wire.is_aborted


# ── against gRPC's own server ─────────────────────────────────────────────────────────────────


async def test_a_status_comes_with_its_words() -> None:
    echo = Echo()
    await echo.start()
    call = await open_call(echo.address, METHOD, lambda messages: None, 60.0)
    call.send(b"fail")
    with pytest.raises(CallEnded, match=r"^resource_exhausted: no room: 3 % left é$"):
        await call.ended
    await call.close()
    await echo.stop()


@for_each("address", ["127.0.0.1:1", "nowhere", "host:port"])
async def test_where_nothing_listens_is_unavailable(address: str) -> None:
    with pytest.raises(CallEnded, match=f"^unavailable: cannot connect to {address}: "):
        await open_call(address, METHOD, lambda messages: None, 60.0)
