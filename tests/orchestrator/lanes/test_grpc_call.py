"""A gRPC call on the event loop: beside gRPC's own server, and against peers that misbehave."""

import asyncio
import struct
from collections.abc import AsyncIterator, Iterable

import grpc
import pytest
from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.lanes.grpc_call import CallEnded, GrpcCall, open_call
from orchestrator.lanes.http2 import (
    DEFAULT_FRAME_BYTES,
    DEFAULT_WINDOW,
    HEAD,
    HEAD_BYTES,
    Flag,
    Kind,
    Setting,
    frame,
    settings,
    window_update,
)

METHOD = "/test.Echo/Talk"
MESSAGES = st.lists(st.binary(max_size=300), min_size=1, max_size=8)


class Wire(asyncio.Transport):
    """Keeps what a call writes."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.is_aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data

    def abort(self) -> None:
        self.is_aborted = True

    def take(self) -> list[tuple[int, int, int, bytes]]:
        """Kind, flags, stream and payload of each frame since the last call."""
        frames, at = [], 0
        while at < len(self.sent):
            word, flags, stream = HEAD.unpack_from(self.sent, at)
            start = at + HEAD_BYTES
            at = start + (word >> 8)
            frames.append((word & 0xFF, flags, stream, bytes(self.sent[start:at])))
        self.sent.clear()
        return frames


class Rig:
    """A call without a socket."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.together: list[int] = []
        self.call = GrpcCall("host:1", METHOD, self._take)
        self.wire = Wire()
        self.call.connection_made(self.wire)
        preface = self.wire.sent.index(b"SM\r\n\r\n") + 6
        del self.wire.sent[:preface]
        self.wire.take()

    def _take(self, messages: list[bytes]) -> None:
        self.got += messages
        self.together.append(len(messages))

    def receive(self, data: bytes) -> None:
        room = self.call.get_buffer(-1)
        room[: len(data)] = data
        self.call.buffer_updated(len(data))

    def error(self) -> CallEnded:
        error = self.call.ended.exception()
        assert isinstance(error, CallEnded)
        return error


def message(data: bytes) -> bytes:
    return struct.pack(">BI", 0, len(data)) + data


def data_frames(stream: bytes, size: int) -> Iterable[bytes]:
    return [frame(Kind.DATA, 0, 1, stream[at : at + size]) for at in range(0, len(stream), size)]


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


async def test_what_came_together_is_handed_over_together() -> None:
    rig = Rig()
    rig.receive(b"".join(frame(Kind.DATA, 0, 1, message(b"%d" % n)) for n in range(5)))
    assert rig.together == [5]


async def test_padding_is_no_part_of_a_message() -> None:
    rig = Rig()
    rig.receive(frame(Kind.DATA, Flag.PADDED, 1, b"\x03" + message(b"ab") + bytes(3)))
    assert rig.got == [b"ab"]


async def test_no_more_is_sent_than_the_peer_has_room_for() -> None:
    rig = Rig()
    data = bytes(3 * DEFAULT_WINDOW)
    rig.call.send(data)

    def sent() -> list[int]:
        return [len(payload) for kind, _, _, payload in rig.wire.take() if kind == Kind.DATA]

    first = sent()
    assert sum(first) == DEFAULT_WINDOW
    assert max(first) <= DEFAULT_FRAME_BYTES
    rig.receive(window_update(0, 1000))
    assert sent() == []  # the stream's own window is still shut
    rig.receive(window_update(1, 600))
    assert sent() == [600]
    larger = {Setting.INITIAL_WINDOW_SIZE: DEFAULT_WINDOW + 100, Setting.MAX_FRAME_SIZE: 70_000}
    rig.receive(settings(larger))
    assert sent() == [100]
    rig.receive(window_update(0, 10**6) + window_update(1, 10**6))
    rest = sent()
    assert sum(rest) == len(message(data)) - DEFAULT_WINDOW - 700
    assert max(rest) > DEFAULT_FRAME_BYTES


async def test_the_peer_is_told_of_room_as_its_data_is_taken() -> None:
    rig = Rig()
    piece = frame(Kind.DATA, 0, 1, message(bytes(16_000)))
    room = {0: 0, 1: 0}
    for _ in range(300):
        rig.receive(piece)
    for kind, _, stream, payload in rig.wire.take():
        if kind == Kind.WINDOW_UPDATE:
            room[stream] += int.from_bytes(payload, "big")
    assert room[0] == room[1] > 2_000_000


async def test_pings_and_settings_are_answered() -> None:
    rig = Rig()
    rig.receive(frame(Kind.PING, 0, 0, b"12345678") + settings({}))
    rig.receive(frame(Kind.PING, Flag.ACK, 0, b"12345678") + frame(Kind.SETTINGS, Flag.ACK, 0))
    assert rig.wire.take() == [
        (Kind.PING, Flag.ACK, 0, b"12345678"),
        (Kind.SETTINGS, Flag.ACK, 0, b""),
    ]


@pytest.mark.parametrize(
    ("received", "status"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", "internal"),
        (frame(Kind.DATA, 0, 1, b"\x01\x00\x00\x00\x01x"), "internal"),
        (frame(Kind.DATA, Flag.PADDED, 1, b"\x09x"), "internal"),
        (frame(Kind.HEADERS, Flag.END_HEADERS, 1, b"\xff\xff\xff\xff\xff"), "internal"),
        (frame(Kind.SETTINGS, 0, 0, b"xyz"), "internal"),
        (frame(Kind.WINDOW_UPDATE, 0, 1, b"x"), "internal"),
        (frame(Kind.PUSH_PROMISE, 0, 1), "internal"),
        (frame(Kind.DATA, Flag.END_STREAM, 1), "ok"),
        (frame(Kind.RST_STREAM, 0, 1, b"\x00\x00\x00\x08"), "unavailable"),
        (frame(Kind.GOAWAY, 0, 0, bytes(8) + b"too many"), "unavailable"),
        (
            frame(Kind.HEADERS, Flag.END_HEADERS, 1, Encoder().encode([(":status", "503")])),
            "unavailable",
        ),
    ],
)
async def test_whatever_a_peer_does_wrong_ends_the_call(received: bytes, status: str) -> None:
    rig = Rig()
    rig.receive(received)
    assert rig.error().status == status
    assert rig.wire.is_aborted


async def test_messages_before_the_end_are_handed_over() -> None:
    rig = Rig()
    trailers = Encoder().encode([("grpc-status", "14"), ("grpc-message", "going%20down")])
    rig.receive(
        frame(Kind.DATA, 0, 1, message(b"last"))
        + frame(Kind.HEADERS, Flag.END_STREAM, 1, trailers[:3])
        + frame(Kind.CONTINUATION, Flag.END_HEADERS, 1, trailers[3:])
    )
    assert rig.got == [b"last"]
    assert str(rig.error()) == "unavailable: going down"


async def test_what_the_taker_raises_ends_the_call() -> None:
    def refuse(messages: list[bytes]) -> None:
        raise ValueError("not what was promised")

    call, wire = GrpcCall("host:1", METHOD, refuse), Wire()
    call.connection_made(wire)
    data = frame(Kind.DATA, 0, 1, message(b"x"))
    call.get_buffer(-1)[: len(data)] = data
    call.buffer_updated(len(data))
    with pytest.raises(ValueError, match="promised"):
        await call.ended
    assert wire.is_aborted


# ── beside gRPC's own server ─────────────────────────────────────────────────────────────────


class Server:
    """Echoes; ``fail`` ends the call with a status, ``over`` says that one did."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.address = ""

    async def talk(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        try:
            async for request in requests:
                if request == b"fail":
                    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room: 3 % left é")
                await context.write(request)
        finally:
            self.over.set()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    echo = Server()
    handlers = {"Talk": grpc.stream_stream_rpc_method_handler(echo.talk)}
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    served = grpc.aio.server(options=options)
    served.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Echo", handlers)])
    echo.address = f"127.0.0.1:{served.add_insecure_port('127.0.0.1:0')}"
    await served.start()
    yield echo
    await served.stop(None)


async def test_large_and_small_messages_go_both_ways(server: Server) -> None:
    sent = [b"small", b"", bytes(range(256)) * 20_000, b"x"]
    got: list[bytes] = []
    all_here = asyncio.Event()

    def take(messages: list[bytes]) -> None:
        got.extend(messages)
        if len(got) == len(sent):
            all_here.set()

    call = await open_call(server.address, METHOD, take, 60.0)
    for each in sent:
        call.send(each)
    await all_here.wait()
    assert got == sent
    await call.close()
    await call.close()
    await server.over.wait()


async def test_a_status_comes_with_its_words(server: Server) -> None:
    call = await open_call(server.address, METHOD, lambda messages: None, 60.0)
    call.send(b"fail")
    with pytest.raises(CallEnded, match=r"^resource_exhausted: no room: 3 % left é$"):
        await call.ended
    await call.close()


async def test_a_method_that_is_not_there_is_named_so(server: Server) -> None:
    call = await open_call(server.address, "/test.Echo/Other", lambda messages: None, 60.0)
    with pytest.raises(CallEnded, match=r"^unimplemented: "):
        await call.ended
    await call.close()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "host:port"])
async def test_where_nothing_listens_is_unavailable(address: str) -> None:
    with pytest.raises(CallEnded, match=f"^unavailable: cannot connect to {address}: "):
        await open_call(address, METHOD, lambda messages: None, 60.0)
