"""Asks one worker to serve another model, and follows the swap. It is a separate call, because a
lane's jobs must not share its fate.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
from google.protobuf.message import DecodeError

from orchestrator.errors import InstanceLost, InvalidRequest, NotReady, SwapFailed, TidegateError
from orchestrator.lanes.config import OPEN_TIMEOUT_S
from orchestrator.lanes.grpc_call import CallEnded, open_call
from orchestrator.lanes.wire import (
    STREAM_METHOD,
    BadResponse,
    service_pb2,
    to_frame,
    to_request,
)
from orchestrator.tls import Tls
from protocol import Code, Swap, SwapPhase, SwapReport

_KEEPALIVE_S = 10.0
OnReport = Callable[[SwapReport], None]


async def ask_for_swap(
    address: str, message: Swap, on_report: OnReport, *, tls: Tls | None = None
) -> SwapReport:
    """Request a swap and follow it; returns the last report of a completed swap. Raises
    ``SwapFailed`` if the old model is kept, ``InvalidRequest`` or ``NotReady`` if the worker does
    not begin, ``InstanceLost`` if the reports stop. If this call is cancelled, the worker
    continues."""
    done: asyncio.Future[SwapReport] = asyncio.get_running_loop().create_future()

    def take(messages: list[bytes]) -> None:
        for raw in messages:
            response = service_pb2.ModelStreamInferResponse.FromString(raw)
            if response.error_message:
                raise _refusal(response.error_message)
            frame = to_frame(response.infer_response)
            if frame is None or frame.swap is None:
                continue
            on_report(frame.swap)
            if frame.swap.phase in (SwapPhase.DONE, SwapPhase.FAILED) and not done.done():
                done.set_result(frame.swap)

    call = None
    try:
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            call = await open_call(address, STREAM_METHOD, take, _KEEPALIVE_S, tls)
        call.send(to_request(message, "swap").SerializeToString())
        either: list[asyncio.Future[Any]] = [done, call.ended]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            call.ended.result()
            raise InstanceLost("the instance ended the swap call without an answer")
    except (CallEnded, BadResponse, DecodeError, msgspec.DecodeError, TimeoutError) as error:
        raise InstanceLost(f"the instance was lost while it swapped: {error}") from error
    finally:
        if call is not None:
            with contextlib.suppress(Exception):
                await call.close()
    report = done.result()
    if report.phase is SwapPhase.FAILED:
        raise SwapFailed(report.error)
    return report


def _refusal(text: str) -> TidegateError:
    """The error for a worker's ``code: message``, which Triton forwards."""
    for code in Code:
        head, found, message = text.partition(f"{code.value}: ")
        if found and len(head) < 80:
            break
    else:
        return InstanceLost(f"the instance did not accept the swap: {text}")
    if code is Code.INVALID_REQUEST:
        return InvalidRequest(message, field="settings")
    if code in (Code.NOT_READY, Code.DRAINING):
        return NotReady(message)
    return SwapFailed(message)
