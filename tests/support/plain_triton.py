"""A Triton with an LLM backend of somebody else's: the plain contract on a real gRPC socket."""

import asyncio
import json
import struct
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.certificates import listen
from tests.support.other_servers import MODEL, Asked, OtherServer

_VLLM_INPUTS = {
    "text_input": "BYTES",
    "stream": "BOOL",
    "sampling_parameters": "BYTES",
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
    "return_num_output_tokens": "BOOL",
}
_TRTLLM_INPUTS = {
    "text_input": "BYTES",
    "max_tokens": "INT32",
    "stream": "BOOL",
    "stop_words": "BYTES",
    "temperature": "FP32",
    "top_k": "INT32",
    "top_p": "FP32",
    "random_seed": "UINT64",
    "min_length": "INT32",
    "exclude_input_in_output": "BOOL",
}
_UNPACKED = {"INT32": "<i", "UINT64": "<Q", "FP32": "<f", "BOOL": "<?"}


class PlainTriton(OtherServer):
    """``vllm_backend``, or with ``is_trtllm`` the ``ensemble`` of ``tensorrtllm_backend``."""

    kind = "triton"
    is_trtllm = False

    def __init__(self) -> None:
        super().__init__()
        self.deadlines: list[float | None] = []
        """Seconds that each call had left when it came."""
        self.inputs = _TRTLLM_INPUTS if self.is_trtllm else _VLLM_INPUTS
        self.credentials: grpc.ServerCredentials | None = None
        self._server: grpc.aio.Server | None = None

    def entry(self, folder: Path, **more: object) -> str:
        stated = "".join(f"&{name}={value}" for name, value in more.items())
        return f"triton+grpc://127.0.0.1:{self.port}/{self.model}?tokenizer={folder}{stated}"

    async def start(self) -> None:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Servicer(self), server)
        self.port = listen(server, f"127.0.0.1:{self.port}", self.credentials)
        await server.start()
        self._server = server

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)


class PlainTrtLlm(PlainTriton):
    is_trtllm = True


class _Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(self, server: PlainTriton) -> None:
        self._server = server

    async def ModelReady(self, request: Any, context: Any) -> Any:
        if self._server.is_silent:
            await asyncio.Event().wait()
        ready = not self._server.is_unhealthy
        return service_pb2.ModelReadyResponse(ready=ready)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerMetadataResponse(name="triton", version="2.51.0")

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        if request.name != self._server.model:
            await context.abort(grpc.StatusCode.NOT_FOUND, "Request for unknown model")
        tensor = service_pb2.ModelMetadataResponse.TensorMetadata
        outputs = {"text_output": "BYTES"}
        if not self._server.is_trtllm:
            outputs |= {"finish_reason": "BYTES", "num_output_tokens": "UINT32"}
        shape = [-1, 1] if self._server.is_trtllm else [1]
        return service_pb2.ModelMetadataResponse(
            name=request.name,
            inputs=[
                tensor(name=n, datatype=d, shape=shape) for n, d in self._server.inputs.items()
            ],
            outputs=[tensor(name=n, datatype=d, shape=[-1]) for n, d in outputs.items()],
        )

    async def ModelStreamInfer(self, requests: Any, context: grpc.aio.ServicerContext) -> None:
        server = self._server
        request = await context.read()
        body = _body(request)
        server.deadlines.append(context.time_remaining())
        script = server.plan(body)
        asked = Asked(body, script)
        server.asked.append(asked)
        server.running += 1
        try:
            if script.status != 200:
                status = grpc.StatusCode.INVALID_ARGUMENT
                if script.status >= 500:
                    status = grpc.StatusCode.INTERNAL
                await context.abort(status, "not now")
            await self._stream(asked, context)
        except asyncio.CancelledError:
            asked.is_aborted = True
            raise
        finally:
            server.running -= 1
            await asyncio.shield(server.tell())

    async def _stream(self, asked: Asked, context: grpc.aio.ServicerContext) -> None:
        script, server = asked.script, self._server
        limit = int(asked.body["max_tokens"])
        total = limit if script.tokens is None else min(limit, script.tokens)
        has_end = script.tokens is not None and script.tokens < limit
        for at in range(total + has_end):
            if script.stall_at == at:
                await server.tell()
                await asyncio.Event().wait()
            if script.fail_at == at:
                await context.abort(grpc.StatusCode.INTERNAL, "the engine failed")
            if script.step_s:
                await asyncio.sleep(script.step_s)
            if script.cut_at == at:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
            asked.made += 1
            if script.ends_early and at == total - 1:
                return
            is_last = at == total + has_end - 1
            reason = ("stop" if at == total else "length") if is_last else "None"
            text = "" if at == total else script.spoken(at)
            await context.write(_response(text, reason, is_last, counts=not server.is_trtllm))
            await server.tell()


def _body(request: Any) -> dict[str, Any]:
    """The request's tensors by name; what ``sampling_parameters`` say among them."""
    body: dict[str, Any] = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        if tensor.datatype == "BYTES":
            values, at = [], 0
            while at < len(raw):
                (size,) = struct.unpack_from("<I", raw, at)
                values.append(raw[at + 4 : at + 4 + size].decode())
                at += 4 + size
            body[tensor.name] = values if tensor.name == "stop_words" else values[0]
        else:
            (body[tensor.name],) = struct.unpack(_UNPACKED[tensor.datatype], raw)
    return body | json.loads(body.get("sampling_parameters", "{}"))


def _response(text: str, reason: str, is_last: bool, *, counts: bool) -> Any:
    response = service_pb2.ModelInferResponse(model_name=MODEL)

    def add(name: str, datatype: str, raw: bytes) -> None:
        response.outputs.add(name=name, datatype=datatype, shape=[1])
        response.raw_output_contents.append(raw)

    add("text_output", "BYTES", struct.pack("<I", len(text.encode())) + text.encode())
    if counts:
        add("finish_reason", "BYTES", struct.pack("<I", len(reason)) + reason.encode())
        add("num_output_tokens", "UINT32", struct.pack("<I", 1))
    response.parameters["triton_final_response"].bool_param = is_last
    return service_pb2.ModelStreamInferResponse(infer_response=response)
