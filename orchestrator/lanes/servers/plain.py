"""A lane to a Triton LLM backend by its plain contract: one gRPC stream per job, on one connection.

The card says what such a backend lacks (``contract``): prompts are sent as text, answers come as
text without ids, and the backend does not tell how full its engine is. A job is cancelled by
closing its stream, which Triton reports to the backend, and its deadline is the call's. Tidegate's
own lanes avoid a response per token and a stream per job.
"""

import asyncio
from typing import Final

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from orchestrator.lanes.servers.cards import BadFolder, ModelFolder, ServerFacts
from orchestrator.lanes.servers.contract import Contract, NoSuchContract, contract_of
from orchestrator.lanes.servers.job import Finish, JobFailed, LaneJob, Piece, ServerLost
from orchestrator.lanes.servers.polled import PolledLane
from orchestrator.lanes.servers.text import TokenCounter
from orchestrator.tls import Tls, open_channel, why_no_channel
from protocol import Code, FinishReason, excerpt

ABORT_MS: Final = 100.0
"""Ms until an aborted job's slot is free. Backends look for a closed stream at a response, or every
so often (TensorRT-LLM: 100 ms)."""
SLOTS: Final = 32
_OPTIONS: Final = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.use_local_subchannel_pool", 1),
)
_ERRORS_AS_STATUS: Final = (("triton_grpc_error", "true"),)
_GONE: Final = ("has no available versions", "unknown model", "is not ready")
"""Triton's words for a model that is not there any more."""
_CODES: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: Code.INVALID_REQUEST,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Code.QUEUE_FULL,
}
_LOST: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.NOT_FOUND,
)


class PlainLane(PolledLane):
    """A lane to one model of one Triton."""

    takes_text = True
    _channel: grpc.aio.Channel | None = None
    _stub: service_pb2_grpc.GRPCInferenceServiceStub | None = None
    _contract: Contract | None = None

    async def _reach(self, folder: ModelFolder) -> ServerFacts:
        if self._channel is None:
            try:
                self._channel = await open_channel(self.endpoint.host, self._config.tls, _OPTIONS)
            except ValueError as error:
                raise ServerLost(str(error)) from None
            self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        await self._poll()
        assert self._stub is not None
        try:
            metadata = await self._stub.ModelMetadata(
                service_pb2.ModelMetadataRequest(name=self.endpoint.model)
            )
            server = await self._stub.ServerMetadata(service_pb2.ServerMetadataRequest())
        except grpc.aio.AioRpcError as error:
            raise ServerLost(_said(error)) from None
        try:
            contract = self._contract = contract_of(metadata)
        except NoSuchContract as error:
            raise BadFolder(str(error)) from None
        self.leaves_stops = contract.is_trtllm
        return ServerFacts(
            self.endpoint.model,
            contract.engine,
            str(server.version),
            lacks=contract.lacks,
            abort_ms=ABORT_MS,
            slots=SLOTS,
        )

    async def _poll(self) -> int | None:
        assert self._stub is not None
        try:
            answer = await self._stub.ModelReady(
                service_pb2.ModelReadyRequest(name=self.endpoint.model)
            )
        except grpc.aio.AioRpcError as error:
            raise ServerLost(_said(error, self._config.tls)) from None
        if not answer.ready:
            raise ServerLost(f"its model {self.endpoint.model!r} is not ready")
        return None

    async def _drop_connection(self) -> None:
        # A channel keeps a connection that is half open until the kernel gives it up.
        await self._disconnect()

    async def _disconnect(self) -> None:
        channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            await channel.close()

    async def _generate(self, job: LaneJob, prompt: str | list[int]) -> Finish:
        assert self._text is not None and self._contract is not None and self._stub is not None
        assert isinstance(prompt, str)
        contract, counter, reason = self._contract, TokenCounter(self._text), ""
        request = contract.request(self.endpoint.model, job.correlation_id, prompt, job.sampling)
        call = self._stub.ModelStreamInfer(
            timeout=job.left_s(self._clock.now()), metadata=_ERRORS_AS_STATUS
        )
        try:
            await call.write(request)
            await call.done_writing()
            async for response in call:
                if response.error_message:
                    raise _failure(response.error_message)
                answer = contract.answer(response.infer_response)
                count = answer.tokens
                if count is None:  # the backend does not count them
                    made = counter.feed(answer.text) if answer.text else 0
                    count = made - job.completion_tokens
                self._deliver(job, Piece(job.unnamed(count), answer.text))
                reason = answer.finish_reason or reason
                if answer.is_final:
                    return Finish(_reason(reason, job))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                await asyncio.sleep(1.0)  # our deadline ends it as the client wants
            if error.code() in _LOST:
                raise ServerLost(_said(error)) from None
            raise JobFailed(_CODES.get(error.code(), Code.ENGINE_ERROR), _said(error)) from None
        except asyncio.InvalidStateError:  # the call ended before the request was written
            raise ServerLost("its stream ended before the request was sent") from None
        finally:
            call.cancel()
        raise ServerLost("its answer ended early")


def _reason(told: str, job: LaneJob) -> FinishReason:
    if told in ("stop", "length"):
        return FinishReason(told)
    return FinishReason.STOP if job.left_tokens else FinishReason.LENGTH


def _failure(message: str) -> Exception:
    said = excerpt(message, 300)
    if any(words in message for words in _GONE):
        return ServerLost(said)
    return JobFailed(Code.ENGINE_ERROR, f"its server failed: {said}")


def _said(error: grpc.aio.AioRpcError, tls: Tls | None = None) -> str:
    details = error.details() or ""
    said = excerpt(f"{error.code().name.lower()}: {details}", 300)
    why = why_no_channel(details, tls)
    return f"{why} ({said})" if why else said
