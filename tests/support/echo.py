"""A gRPC server that says what it is told, with TLS or without."""

from collections.abc import AsyncIterator

import grpc

from tests.support.certificates import listen

METHOD = "/test.Echo/Talk"


class Echo:
    """``fail`` ends the call with a status."""

    def __init__(self) -> None:
        self.address = ""
        self._server: grpc.aio.Server | None = None

    async def talk(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        async for request in requests:
            if request == b"fail":
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room: 3 % left é")
            await context.write(request)

    async def start(self, tls: grpc.ServerCredentials | None = None, port: int = 0) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        handlers = {"Talk": grpc.stream_stream_rpc_method_handler(self.talk)}
        generic = grpc.method_handlers_generic_handler("test.Echo", handlers)
        self._server.add_generic_rpc_handlers([generic])
        self.address = f"127.0.0.1:{listen(self._server, f'127.0.0.1:{port}', tls)}"
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
