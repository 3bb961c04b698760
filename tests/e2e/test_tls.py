"""Mutual TLS with a real Triton: its own checks and lanes (OR-25)."""

from collections.abc import Iterator

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from orchestrator.tls import Tls, spell_tls
from tests.support.certificates import certificates
from tests.support.processes import eventually
from tests.support.stack import Orchestrator, Triton, asked, running, started
from tidegate import SyncClient

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def tls() -> Tls:
    made = certificates()
    shown = made.server
    return Tls(ca=made.ca.certificate, certificate=shown.certificate, key=shown.key)


@pytest.fixture(scope="module")
def triton(tls: Tls) -> Iterator[Triton]:
    triton = Triton(tls=tls, engine="synthetic-free", lane_token="a-lane-token")
    with started(triton):
        yield triton


def test_lanes_go_over_it(triton: Triton, tls: Tls) -> None:
    lanes = Orchestrator(triton.grpc, lanes__token="a-lane-token", lanes__tls=spell_tls(tls))
    with running(lanes), SyncClient(lanes.url) as client:
        eventually(lambda: "demo" in client.models(), "its model")
        answer = client.generate("hi", model="demo", max_tokens=4)
        assert answer.outcome == "met", answer


def test_who_shows_nothing_is_told_nothing(triton: Triton, tls: Tls) -> None:
    assert tls.ca is not None
    request = service_pb2.ServerMetadataRequest()
    one_way = grpc.ssl_channel_credentials(tls.ca.read_bytes())
    for channel in (grpc.insecure_channel(triton.grpc), grpc.secure_channel(triton.grpc, one_way)):
        with channel, pytest.raises(grpc.RpcError) as refused:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerMetadata(request, timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]


def test_a_certificate_is_asked_for_at_the_grpc_port_alone(triton: Triton) -> None:
    """What Triton's HTTP port, which knows no TLS, lets a stranger do: be told of its health, and
    speak the plain contract where no plain token is asked for (docs/threat-model.md)."""
    assert asked(f"{triton.http}/v2/health/ready")[0] == 200
    body = {"text_input": "x", "max_tokens": 2}
    assert asked(f"{triton.http}/v2/models/llm/generate", body)[0] == 200
    for path in ("repository/index", "repository/models/llm/unload", "logging"):
        assert asked(f"{triton.http}/v2/{path}", {})[0] == 403
