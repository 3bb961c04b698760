"""gRPC: external processing for gateways, and health checks of the picker."""

import asyncio
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import SERVICE_NAME
from grpc_health.v1.health import aio as health

from orchestrator.telemetry.log import service_log
from picker.ext_proc import METHOD, SERVICE, ProcessingResponse
from picker.picker import EndpointPicker
from picker.stream import MOST_BODY_BYTES, GatewayError, RequestStream

LIVENESS, READINESS = "liveness", "readiness"
"""Health check names that the protocol requires besides the service's own name."""
MAX_REQUESTS: Final = 4096
"""Maximum parallel requests, from the first message to the end of the answer."""
_WHEN_READY = ("", READINESS, SERVICE)
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_KEEPALIVE_MS = 30_000


class PickerServer:
    """Serves one ``EndpointPicker``. ``check`` updates the status for health probes."""

    def __init__(self, picker: EndpointPicker) -> None:
        self._picker = picker
        self._health = health.HealthServicer()
        self._server = grpc.aio.server(
            options=[
                # A body may arrive in one message; one over the limit must still get an answer.
                ("grpc.max_receive_message_length", 2 * MOST_BODY_BYTES + 2**20),
                ("grpc.so_reuseport", 0),
                # gRPC would read ahead everything on the connection (508 MB with 100 unfinished
                # bodies of 4 MiB; 399 MB without the probe).
                ("grpc.http2.bdp_probe", 0),
                ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ],
            maximum_concurrent_rpcs=MAX_REQUESTS,
        )
        handler = grpc.stream_stream_rpc_method_handler(
            self.process, response_serializer=ProcessingResponse.SerializeToString
        )
        response_serializer = health_pb2.HealthCheckResponse.SerializeToString
        probes = {
            "Check": grpc.unary_unary_rpc_method_handler(
                self._health.Check, _probe, response_serializer
            ),
            "Watch": grpc.unary_stream_rpc_method_handler(
                self._health.Watch, _probe, response_serializer
            ),
        }
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),
                grpc.method_handlers_generic_handler(SERVICE_NAME, probes),
            )
        )

    async def start(self) -> int:
        """Listen; return the port. Raises ``OSError``."""
        config = self._picker.section
        where = f"[{config.host}]" if ":" in config.host else config.host
        address = f"{where}:{config.port}"
        try:
            if config.tls_certificate is None or config.tls_key is None:
                port = self._server.add_insecure_port(address)
            else:
                pair = await asyncio.to_thread(_pair, config.tls_key, config.tls_certificate)
                port = self._server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from None
        await self.check()
        await self._server.start()
        return int(port)

    async def check(self) -> None:
        """Report to health probes whether requests can be answered now."""
        await self._health.set(LIVENESS, _SERVING)
        ready = _SERVING if self._picker.pods.is_ready else _NOT_SERVING
        for name in _WHEN_READY:
            await self._health.set(name, ready)

    async def stop(self, grace_s: float) -> None:
        """Accept no new requests; running ones have ``grace_s`` seconds."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)

    async def process(self, _messages: object, call: "grpc.aio.ServicerContext[Any, Any]") -> None:
        """``ExternalProcessor.Process``: one request and its answer."""
        # Read messages from the call: the iterator would hold each one until the next arrives.
        stream = RequestStream(self._picker)
        try:
            while not stream.is_over and (message := await call.read()) is not grpc.aio.EOF:
                replies = stream.take(message)
                del message
                for reply in replies:
                    await call.write(reply)
                del replies
        except grpc.aio.InternalError:  # the gateway's connection is gone
            pass
        except GatewayError as error:
            await call.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Exception:
            service_log.exception("picking a pod for a request failed")
            raise
        finally:
            stream.close()


def _probe(encoded: bytes) -> health_pb2.HealthCheckRequest:
    """The service that a probe names. An unreadable message becomes an unknown name; otherwise gRPC
    would log a traceback."""
    try:
        return health_pb2.HealthCheckRequest.FromString(encoded)
    except DecodeError:
        return health_pb2.HealthCheckRequest(service="(unreadable)")


def _pair(key: Path, certificate: Path) -> tuple[bytes, bytes]:
    """The key and the certificate chain in PEM. Raises ``OSError``, which names the file."""
    try:
        return key.read_bytes(), certificate.read_bytes()
    except OSError as error:
        raise OSError(f"{error.filename} cannot be read: {error.strerror}") from None
