"""Messages that the proxy writes itself, or changes."""

from typing import Any

from mcp_types import (
    ErrorData,
    JSONRPCError,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    RequestId,
)

from tidegate.proxy.limits import CALL
from tidegate.tools import TIMEOUT_META_KEY

CANCELLED = "notifications/cancelled"


def params_of(message: JSONRPCRequest | JSONRPCNotification) -> dict[str, Any]:
    return message.params or {}


def name_of(request: JSONRPCRequest) -> str:
    """What a request is called in an error."""
    if request.method == CALL:
        return f"the tool {params_of(request).get('name')!r}"
    return request.method


def failed(request: JSONRPCRequest, code: int, reason: str) -> JSONRPCResponse | JSONRPCError:
    """Answer to a request that got none.

    For a tool it is a result with ``isError``, which an agent's model reads and goes on from;
    ``code`` is in its ``_meta``. Many agents end at a JSON-RPC error, as other requests get it.
    """
    if request.method != CALL:
        error = ErrorData(code=code, message=reason)
        return JSONRPCError(jsonrpc="2.0", id=request.id, error=error)
    result = {
        "content": [{"type": "text", "text": reason}],
        "isError": True,
        "resultType": "complete",  # required since protocol 2026-07-28, ignored before
        "_meta": {"tidegate/error_code": code},
    }
    return JSONRPCResponse(jsonrpc="2.0", id=request.id, result=result)


def cancellation(request_id: RequestId, reason: str) -> JSONRPCNotification:
    """Notification that nobody waits for a request's answer any more."""
    params = {"requestId": request_id, "reason": reason}
    return JSONRPCNotification(jsonrpc="2.0", method=CANCELLED, params=params)


def renamed(message: JSONRPCNotification, request_id: RequestId) -> JSONRPCNotification:
    """The cancellation ``message`` of a request that the other side knows as ``request_id``."""
    params = {**params_of(message), "requestId": request_id}
    return message.model_copy(update={"params": params})


def with_timeout(request: JSONRPCRequest, left_s: float) -> JSONRPCRequest:
    """``request`` with what is left for it, for servers that go by that."""
    params = params_of(request)
    stated = params.get("_meta")
    meta = dict(stated) if isinstance(stated, dict) else {}
    meta[TIMEOUT_META_KEY] = max(0, round(left_s * 1000))
    return request.model_copy(update={"params": {**params, "_meta": meta}})
