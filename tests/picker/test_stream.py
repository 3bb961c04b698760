"""Envoy's side of external processing, over real gRPC: what it sends, and what it may get back."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from picker.ext_proc import (
    BUFFERED,
    BUFFERED_PARTIAL,
    CHUNK_BYTES,
    FULL_DUPLEX_STREAMED,
    GRPC,
    METHOD,
    NONE,
    SERVICE,
    STREAMED,
    ProcessingRequest,
    ProcessingResponse,
)
from tests.support.certificates import certificates
from tests.support.pods import FakePod, ServedPicker, events, serve_picker

DESTINATION = "x-gateway-destination-endpoint"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
Reply = Any


class Envoy:
    """One request's stream, as Envoy opens it."""

    def __init__(self, channel: grpc.aio.Channel, mode: int, answer_mode: int) -> None:
        method = channel.stream_stream(
            f"/{SERVICE}/{METHOD}",
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )
        self.call = method()
        self._modes = {"request_body_mode": mode, "response_body_mode": answer_mode}
        self.hint: object = None

    async def send(self, **fields: Any) -> None:
        if self._modes:  # in the first message alone
            fields, self._modes = fields | {"protocol_config": self._modes}, {}
        message = ProcessingRequest(**fields)
        if self.hint is not None:
            hint, self.hint = self.hint, None
            subset = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            subset["x-gateway-destination-endpoint-subset"] = hint
        await self.call.write(message)

    async def head(
        self, path: str = "/v1/chat/completions", *, end: bool = False, **more: str
    ) -> None:
        headers = {":path": path, ":method": "GET" if end else "POST", **more}
        await self.send(request_headers={"headers": raw(headers), "end_of_stream": end})

    async def body(self, body: bytes, *, end: bool = True) -> None:
        await self.send(request_body={"body": body, "end_of_stream": end})

    async def get(self, kind: str) -> Reply:
        """The next reply, which must answer a message of this kind."""
        reply = await self.call.read()
        assert reply is not grpc.aio.EOF, "the picker has closed the stream"
        assert reply.WhichOneof("kind") == kind
        return reply

    async def picked(self) -> None:
        """Have a pod picked for a whole request."""
        await self.head()
        await self.body(encoded())
        await self.get("request_headers")
        await self.get("request_body")

    async def answered(self, head: Mapping[str, str] = {}) -> None:
        """Let an answer's head pass."""
        await self.send(response_headers={"headers": raw({":status": "200", **head})})
        await self.get("response_headers")

    async def refusal(self) -> tuple[int, dict[str, str], Any]:
        """Status, headers and JSON of an immediate response, which ends the stream."""
        reply = (await self.get("immediate_response")).immediate_response
        assert await self.call.read() is grpc.aio.EOF
        headers = {
            one.header.key: one.header.raw_value.decode() for one in reply.headers.set_headers
        }
        return reply.status.code, headers, json.loads(reply.body)

    async def hang_up(self) -> None:
        await self.call.done_writing()
        assert await self.call.read() is grpc.aio.EOF
        assert await self.call.code() is grpc.StatusCode.OK


async def eventually(holds: Callable[[], bool]) -> None:
    """Wait until something holds; the test's own timeout is the limit."""
    while not holds():  # noqa: ASYNC110 - what is waited for has no event of its own
        await asyncio.sleep(0.005)


def raw(headers: dict[str, str]) -> dict[str, Any]:
    return {"headers": [{"key": k, "raw_value": v.encode()} for k, v in headers.items()]}


def named(reply: Reply, kind: str) -> list[str]:
    """The pods that a reply names, in the header and in the metadata alike."""
    metadata = reply.dynamic_metadata["envoy.lb"][DESTINATION]
    mutation = getattr(reply, kind).response.header_mutation
    (header,) = [one.header for one in mutation.set_headers if one.header.key == DESTINATION]
    assert header.raw_value.decode() == metadata
    return list(str(metadata).split(","))


def encoded(**more: Any) -> bytes:
    return json.dumps(CHAT | more).encode()


class Rig:
    """Two pods, ``busy`` and ``idle``, with a picker and a channel to it."""

    def __init__(
        self, pods: list[FakePod], served: ServedPicker, channel: grpc.aio.Channel
    ) -> None:
        self.busy, self.idle = pods
        self.served = served
        self.channel = channel

    def open(
        self, mode: int = FULL_DUPLEX_STREAMED, answer_mode: int = FULL_DUPLEX_STREAMED
    ) -> Envoy:
        return Envoy(self.channel, mode, answer_mode)

    def flights(self) -> int:
        return sum(len(pod.flights) for pod in self.served.pods)

    async def tell_pace(self) -> None:
        """Have both pods show steps of 10 ms."""
        names = ("iteration_tokens_total_count", "generation_tokens_total")
        for step in range(3):
            for pod in (self.busy, self.idle):
                pod.metrics |= {name: 100.0 * step for name in names}
                pod.metrics["inter_token_latency_seconds_count"] = 100.0 * step
                pod.metrics["inter_token_latency_seconds_sum"] = 1.0 * step
            await self.served.poll()


@asynccontextmanager
async def rig(**sections: Any) -> AsyncIterator[Rig]:
    async with (
        FakePod(num_requests_running=9).serve() as busy,
        FakePod().serve() as idle,
        serve_picker(busy.address, idle.address, **sections) as served,
        grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel,
    ):
        await served.poll()  # others' jobs count once two polls have told of them
        yield Rig([busy, idle], served, channel)


@pytest.fixture
async def one() -> AsyncIterator[Rig]:
    async with rig() as made:
        yield made


async def answer(stream: Envoy, chunks: Sequence[bytes], content_type: str) -> None:
    """Let an answer pass, in order, each part as it is."""
    await stream.answered({"content-type": content_type})
    for at, chunk in enumerate(chunks):
        end = at == len(chunks) - 1
        await stream.send(response_body={"body": chunk, "end_of_stream": end})
        reply = await stream.get("response_body")
        streamed = reply.response_body.response.body_mutation.streamed_response
        assert (streamed.body, streamed.end_of_stream) == (chunk, end)


async def test_full_duplex_answers_the_head_once_the_body_is_here(one: Rig) -> None:
    stream = one.open()
    await stream.head()
    body = encoded(messages=[{"role": "user", "content": "a" * 3 * CHUNK_BYTES}])
    pieces = [body[at : at + 50_000] for at in range(0, len(body), 50_000)]
    for piece in pieces:
        await stream.body(piece, end=piece is pieces[-1])
    reply = await stream.get("request_headers")
    assert named(reply, "request_headers") == [one.idle.address, one.busy.address]
    sent = b""
    while True:
        part = (await stream.get("request_body")).request_body.response.body_mutation
        sent += part.streamed_response.body
        assert len(part.streamed_response.body) <= 64 * 1024
        if part.streamed_response.end_of_stream:
            break
    assert sent == body
    assert one.flights() == 1
    usage = {"prompt_tokens": 9, "completion_tokens": 3}
    await answer(stream, events(3, usage), "text/event-stream")
    assert one.flights() == 0
    await stream.hang_up()


async def test_trailers_end_a_body_that_no_chunk_ended(one: Rig) -> None:
    stream = one.open()
    await stream.head()
    await stream.body(encoded(), end=False)
    await stream.send(request_trailers={"trailers": raw({"x-sum": "1"})})
    named(await stream.get("request_headers"), "request_headers")
    part = (await stream.get("request_body")).request_body.response.body_mutation.streamed_response
    assert (part.body, part.end_of_stream) == (encoded(), False)
    await stream.get("request_trailers")
    await stream.answered()
    await stream.send(response_body={"body": b"{}", "end_of_stream": False})
    await stream.get("response_body")
    await stream.send(response_trailers={"trailers": raw({})})
    await stream.get("response_trailers")
    assert one.flights() == 0
    await stream.hang_up()


@pytest.mark.parametrize("mode", [BUFFERED, BUFFERED_PARTIAL])
async def test_a_buffered_body_is_picked_for_in_answer_to_it(one: Rig, mode: int) -> None:
    stream = one.open(mode, BUFFERED)
    await stream.head()
    reply = await stream.get("request_headers")
    assert not reply.HasField("dynamic_metadata")
    await stream.body(encoded())
    reply = await stream.get("request_body")
    assert named(reply, "request_body")[0] == one.idle.address
    assert not reply.request_body.response.HasField("body_mutation")
    await stream.answered()
    await stream.send(response_body={"body": b"{}", "end_of_stream": True})
    reply = await stream.get("response_body")
    assert not reply.response_body.response.HasField("body_mutation")
    await stream.hang_up()


@pytest.mark.parametrize("mode", [NONE, STREAMED, GRPC])
async def test_where_the_body_comes_too_late_the_head_is_picked_for(one: Rig, mode: int) -> None:
    stream = one.open(mode)
    await stream.head()
    assert named(await stream.get("request_headers"), "request_headers")[0] == one.idle.address
    if mode != NONE:
        for end in (False, True):
            await stream.body(b"ab", end=end)
            reply = (await stream.get("request_body")).request_body
            mutation = reply.response.body_mutation.streamed_response
            assert (mutation.body, mutation.end_of_stream) == (
                (b"ab", end) if mode == GRPC else (b"", False)
            )
    await stream.hang_up()


async def test_who_only_watches_gets_no_reply(one: Rig) -> None:
    stream = one.open()
    for fields in (
        {"request_headers": {"headers": raw({":path": "/v1/chat/completions"})}},
        {"request_body": {"body": encoded(), "end_of_stream": True}},
    ):
        await stream.send(**fields, observability_mode=True)
    await stream.hang_up()
    assert one.flights() == 0


@pytest.mark.parametrize("as_text", [False, True])
async def test_the_gateway_may_narrow_the_choice(one: Rig, as_text: bool) -> None:
    stream = one.open()
    stream.hint = (
        f"{one.busy.address}, 10.0.0.1:80" if as_text else [one.busy.address, "10.0.0.1:80"]
    )
    await stream.head("/v1/models", end=True)
    assert named(await stream.get("request_headers"), "request_headers") == [one.busy.address]
    await stream.hang_up()


@pytest.mark.parametrize("hint", [[], ["10.0.0.1:80"]])
async def test_no_allowed_pod_is_503(one: Rig, hint: list[str]) -> None:
    stream = one.open()
    stream.hint = hint
    await stream.head("/v1/models", end=True)
    status, headers, body = await stream.refusal()
    assert status == 503 and body["error"]["code"] == "not_ready"
    assert headers["x-should-retry"] == "true" and headers["retry-after"] == "1"


async def test_what_is_certain_to_miss_is_refused_as_tidegate_refuses_it(one: Rig) -> None:
    await one.tell_pace()
    stream = one.open()
    await stream.head(**{"x-timeout-ms": "200", "x-request-id": "mine"})
    await stream.body(encoded(max_tokens=500, ignore_eos=True))
    status, headers, body = await stream.refusal()
    assert status == 504
    assert body["error"]["code"] == "deadline_infeasible"
    assert body["error"]["type"] == "timeout_error"
    assert body["error"]["earliest_feasible_deadline"] > 0
    assert headers["x-should-retry"] == "false"
    assert headers["x-deadline-source"] == "X-Timeout-Ms"
    assert headers["x-request-id"] == "mine"
    assert headers["content-type"].startswith("application/json")
    assert one.flights() == 0


async def test_a_deadline_that_is_past_and_one_that_cannot_be_read(one: Rig) -> None:
    for header, status, code in (
        ({"x-timeout-ms": "0"}, 504, "deadline_exceeded"),
        ({"x-timeout-ms": "soon"}, 400, "invalid_request"),
    ):
        stream = one.open()
        await stream.head("/v1/messages", **header)
        await stream.body(encoded(max_tokens=5))
        refused_with, headers, body = await stream.refusal()
        assert refused_with == status
        assert (
            body["type"] == "error" and body["error"]["code"] == code
        )  # as Anthropic's clients read
        assert headers["x-should-retry"] == "false"


async def test_bodies_that_are_still_coming_are_bounded_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is over the bound is passed on unread; what goes, gives its room back."""
    monkeypatch.setattr("picker.stream.ALL_BODIES_BYTES", 4096)
    monkeypatch.setattr("picker.stream.MOST_BODY_BYTES", 2048)
    async with rig() as one:
        held = [one.open() for _ in range(2)]
        for stream in held:
            await stream.head()
            await stream.body(b"x" * 2048, end=False)
        await eventually(lambda: one.served.picker.held_bytes == 4096)
        stream = one.open()
        await stream.head()
        await stream.body(b"y", end=False)
        named(await stream.get("request_headers"), "request_headers")
        await stream.get("request_body")
        for other in held:
            other.call.cancel()
        await eventually(lambda: one.served.picker.held_bytes == 0)
        await stream.hang_up()


async def test_failing_closed_refuses_a_body_over_the_bound_and_pods_without_metrics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("picker.stream.MOST_BODY_BYTES", 2048)
    async with rig(picker={"failure_mode": "closed"}) as one:
        stream = one.open()
        await stream.head()
        await stream.body(b"x" * 3000, end=False)
        status, _, body = await stream.refusal()
        assert status == 413 and body["error"]["code"] == "body_too_large"
        for pod in one.served.pods:
            pod.page_at = -100.0
        stream = one.open()
        await stream.head("/v1/models", end=True)
        status, _, body = await stream.refusal()
        assert status == 503 and body["error"]["code"] == "not_ready"


async def test_an_envoy_that_goes_away_in_the_middle_leaves_nothing_behind(one: Rig) -> None:
    """Before the body is whole, and in the middle of an answer: its message timeout, a client that
    hangs up. What has had no answer may still run, until the pod's metrics tell."""
    stream = one.open()
    await stream.head()
    await stream.body(encoded(), end=False)
    stream.call.cancel()
    stream = one.open()
    await stream.picked()
    assert one.flights() == 1
    await stream.answered()
    stream.call.cancel()
    await eventually(lambda: one.flights() == 0)
    stream = one.open()
    await stream.picked()
    await stream.hang_up()
    assert one.flights() == 1
    await one.served.poll()
    assert one.flights() == 0


async def test_the_pod_that_answered_is_the_one_that_counts(one: Rig) -> None:
    stream = one.open()
    await stream.picked()
    message = ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    served = message.metadata_context.filter_metadata["envoy.lb"]
    served["x-gateway-destination-endpoint-served"] = one.busy.address
    await stream.call.write(message)
    await stream.get("response_headers")
    busy, idle = (one.served.pods.find(pod.address) for pod in (one.busy, one.idle))
    assert busy is not None and idle is not None
    assert (len(busy.flights), len(idle.flights)) == (1, 0)
    await stream.hang_up()


async def test_bytes_that_are_no_message(one: Rig, caplog: pytest.LogCaptureFixture) -> None:
    codes = []
    for method in (f"/{SERVICE}/{METHOD}", "/grpc.health.v1.Health/Check"):
        call = one.channel.stream_stream(method)()
        await call.write(b"\xffSECRET")
        codes.append(await call.code())
    assert codes == [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND]
    assert caplog.text == ""


async def test_tls() -> None:
    made = await asyncio.to_thread(certificates)
    pair = made.server
    picker = {"tls_certificate": pair.certificate, "tls_key": pair.key}
    async with FakePod().serve() as pod, serve_picker(pod.address, picker=picker) as served:
        credentials = grpc.ssl_channel_credentials(made.ca.pem)
        where = f"127.0.0.1:{served.port}"  # which the certificate is for
        async with grpc.aio.secure_channel(where, credentials) as channel:
            stream = Envoy(channel, FULL_DUPLEX_STREAMED, FULL_DUPLEX_STREAMED)
            await stream.head("/v1/models", end=True)
            assert named(await stream.get("request_headers"), "request_headers") == [pod.address]
            await stream.hang_up()


async def test_health_is_what_the_protocol_says(one: Rig) -> None:
    stub = health_pb2_grpc.HealthStub(one.channel)

    async def status(service: str) -> int:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)

    for name in ("", "liveness", "readiness", SERVICE):
        assert await status(name) == health_pb2.HealthCheckResponse.SERVING
    for pod in list(one.served.pods):
        one.served.pods.retire(pod.address)
    await one.served.server.check()
    assert await status("liveness") == health_pb2.HealthCheckResponse.SERVING
    for name in ("", "readiness", SERVICE):
        assert await status(name) == health_pb2.HealthCheckResponse.NOT_SERVING
