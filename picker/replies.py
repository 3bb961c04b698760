"""Makes the messages that are sent to the gateway."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from orchestrator.api.http.context import Context
from orchestrator.api.http.responses import error_response, name_response
from orchestrator.errors import TidegateError
from picker.ext_proc import (
    FULL_DUPLEX_STREAMED,
    GRPC,
    NONE,
    OVERWRITE_IF_EXISTS_OR_ADD,
    SKIP,
    ProcessingResponse,
)

DESTINATION: Final = "x-gateway-destination-endpoint"
"""Header, and key of the dynamic metadata, that names the chosen pods."""
NAMESPACE: Final = "envoy.lb"
CHUNK_BYTES: Final = 62 * 1024
"""Most bytes of a body in one message: the protocol recommends at most 64 KiB with what is around
it."""
_STREAMED = (FULL_DUPLEX_STREAMED, GRPC)
"""Body modes whose chunks go on only as far as they are sent back."""


def go_on(kind: str) -> Any:
    """Have the gateway go on with a head or trailers as they are; ``kind`` names the field."""
    reply = ProcessingResponse()
    getattr(reply, kind).SetInParent()
    return reply


def pass_body(kind: str, body: bytes, mode: int, *, is_last: bool) -> Iterator[Any]:
    """Have a body's chunk go on as it is. In a mode that streams it back it may take several
    messages; ``is_last``: nothing comes after it."""
    if mode not in _STREAMED:
        yield go_on(kind)
        return
    at = 0
    while True:
        part, at = body[at : at + CHUNK_BYTES], at + CHUNK_BYTES
        reply = ProcessingResponse()
        streamed = getattr(reply, kind).response.body_mutation.streamed_response
        streamed.body = part
        streamed.end_of_stream = is_last and at >= len(body)
        yield reply
        if at >= len(body):
            return


def chosen(kind: str, endpoints: Iterable[str], *, has_answer: bool = True) -> Any:
    """Name the chosen pods, the first choice first, in answer to a request's head, body or
    trailers. ``has_answer``: the answer's body tells something, so it is to be shown."""
    named = ",".join(endpoints)
    reply = ProcessingResponse()
    reply.dynamic_metadata[NAMESPACE] = {DESTINATION: named}
    if kind == "request_trailers":
        reply.request_trailers.SetInParent()
        return reply
    response = getattr(reply, kind).response
    response.clear_route_cache = True  # as the reference picker: a route may go by the header
    _set(response.header_mutation, {DESTINATION: named})
    if not has_answer:
        # Only if the gateway lets itself be told, and for a request without a body, whose own mode
        # cannot be changed by this.
        reply.mode_override.response_body_mode = NONE
        reply.mode_override.response_trailer_mode = SKIP
    return reply


def refused(error: TidegateError, context: Context, now: float) -> Any:
    """Answer in the pods' place, as Tidegate itself would: status, headers and JSON. ``now`` is in
    seconds of the clock."""
    response = error_response(error, context, now)
    name_response(response, context)
    reply = ProcessingResponse()
    immediate = reply.immediate_response
    immediate.status.code = response.status
    body = response.body
    assert isinstance(body, bytes)
    immediate.body = body
    immediate.details = f"tidegate_picker_{error.code}"
    _set(immediate.headers, response.headers)
    return reply


def _set(mutation: Any, headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        if name.lower() == "content-length":  # the gateway counts for itself
            continue
        option = mutation.set_headers.add(append_action=OVERWRITE_IF_EXISTS_OR_ADD)
        option.header.key = name.lower()
        option.header.raw_value = value.encode()
