"""Queries one Triton over gRPC: is it up, is its model ready, will it drain. It uses gRPC because
lanes do: an answer here means that lanes can connect, too."""

import contextlib

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from orchestrator.tls import Tls, open_channel
from protocol import Drain

_CHANNEL_OPTIONS = (
    # reconnect to a server that is still starting at once, not a second later
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.enable_http_proxy", 0),
)


class TritonControl:
    """A connection to one server. If the server is dead, calls return False and never raise."""

    def __init__(self, address: str, tls: Tls | None = None) -> None:
        self._address = address
        self._tls = tls

    async def __aenter__(self) -> "TritonControl":
        self._channel = await open_channel(self._address, self._tls, _CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def is_server(self, server_id: str, timeout_s: float) -> bool:
        """Whether the server with ``--id=server_id`` answers."""
        request = service_pb2.ServerMetadataRequest()
        with contextlib.suppress(grpc.RpcError):
            answer = await self._stub.ServerMetadata(request, timeout=timeout_s)
            return bool(answer.name == server_id)
        return False

    async def is_ready(self, model: str, timeout_s: float) -> bool:
        """Whether ``model`` is loaded."""
        request = service_pb2.ModelReadyRequest(name=model)
        with contextlib.suppress(grpc.RpcError):
            return bool((await self._stub.ModelReady(request, timeout=timeout_s)).ready)
        return False

    async def drain(self, model: str, grace_s: float, timeout_s: float, token: str = "") -> bool:
        """Make ``model`` end its jobs within ``grace_s`` and close its lanes; False if it did not.
        ``token`` is the secret that its worker requires. A model without lanes refuses; it may be
        stopped anyway."""
        # Imported here, because a start does not need it, and the CPU is busy then.
        from orchestrator.lanes.wire import to_answered_request

        request = to_answered_request(Drain(grace_ms=grace_s * 1000, token=token), model)
        call = self._stub.ModelStreamInfer(iter([request]), timeout=timeout_s)
        with contextlib.suppress(grpc.RpcError):
            async for answer in call:
                return not answer.error_message
        return False
