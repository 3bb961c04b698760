"""Messages of Envoy's external processing (``envoy.service.ext_proc.v3``) that are used here.

Field numbers are from Envoy 1.40 (api/envoy/service/ext_proc/v3/external_processor.proto and its
imports). Message names are not on the wire, so these have their own package. Fields that are not
listed are skipped. ``xds-protos`` on PyPI has all messages, but overwrites newer files
of ``opentelemetry-proto`` and ``googleapis-common-protos``, which breaks tracing with both.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

from orchestrator.api.http.context import Context
from orchestrator.api.http.responses import error_response, name_response
from orchestrator.errors import TidegateError

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
METHOD: Final = "Process"

NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX_STREAMED, GRPC = range(6)
"""How a body is sent here: ``ProcessingMode.BodySendMode``."""
SEND, SKIP = 1, 2
"""Whether heads and trailers are sent here: ``ProcessingMode.HeaderSendMode``; 0 is the default."""
OVERWRITE_IF_EXISTS_OR_ADD: Final = 2
"""How a header is set: ``HeaderValueOption.HeaderAppendAction``."""

_SCALARS = frozenset(descriptor_pb2.FieldDescriptorProto.Type.keys())
_PACKAGE = "tidegate.ext_proc"
_STRUCT = "google.protobuf.Struct"
_FIELDS: dict[str, str] = {
    "HeaderValue": "1 key string, 2 value string, 3 raw_value bytes",
    "HeaderMap": "1 headers HeaderValue*",
    "HeaderValueOption": "1 header HeaderValue, 3 append_action int32",
    "HeaderMutation": "1 set_headers HeaderValueOption*, 2 remove_headers string*",
    "Metadata": "1 filter_metadata Metadata.FilterMetadataEntry*",
    "Metadata.FilterMetadataEntry": f"1 key string, 2 value {_STRUCT}",
    "ProcessingMode": (
        "1 request_header_mode int32, 2 response_header_mode int32, 3 request_body_mode int32, "
        "4 response_body_mode int32, 5 request_trailer_mode int32, 6 response_trailer_mode int32"
    ),
    "HttpStatus": "1 code int32",
    "HttpHeaders": "1 headers HeaderMap, 3 end_of_stream bool",
    "HttpBody": "1 body bytes, 2 end_of_stream bool",
    "HttpTrailers": "1 trailers HeaderMap",
    "ProtocolConfiguration": (
        "1 request_body_mode int32, 2 response_body_mode int32, "
        "3 send_body_without_waiting_for_header_response bool"
    ),
    "ProcessingRequest": (
        "2 request_headers HttpHeaders|, 3 response_headers HttpHeaders|, "
        "4 request_body HttpBody|, 5 response_body HttpBody|, "
        "6 request_trailers HttpTrailers|, 7 response_trailers HttpTrailers|, "
        "8 metadata_context Metadata, 10 observability_mode bool, "
        "11 protocol_config ProtocolConfiguration"
    ),
    "StreamedBodyResponse": "1 body bytes, 2 end_of_stream bool",
    "BodyMutation": "1 body bytes|, 2 clear_body bool|, 3 streamed_response StreamedBodyResponse|",
    "CommonResponse": (
        "1 status int32, 2 header_mutation HeaderMutation, 3 body_mutation BodyMutation, "
        "5 clear_route_cache bool"
    ),
    "HeadersResponse": "1 response CommonResponse",
    "BodyResponse": "1 response CommonResponse",
    "TrailersResponse": "1 header_mutation HeaderMutation",
    "ImmediateResponse": (
        "1 status HttpStatus, 2 headers HeaderMutation, 3 body bytes, 5 details string"
    ),
    "ProcessingResponse": (
        "1 request_headers HeadersResponse|, 2 response_headers HeadersResponse|, "
        "3 request_body BodyResponse|, 4 response_body BodyResponse|, "
        "5 request_trailers TrailersResponse|, 6 response_trailers TrailersResponse|, "
        f"7 immediate_response ImmediateResponse|, 8 dynamic_metadata {_STRUCT}, "
        "9 mode_override ProcessingMode"
    ),
}
"""Fields by message: number, name and type; ``*`` is repeated, ``|`` one of those that exclude each
other."""


def _made() -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    file = descriptor_pb2.FileDescriptorProto(
        name="tidegate/ext_proc.proto",
        package=_PACKAGE,
        syntax="proto3",
        dependency=["google/protobuf/struct.proto"],
    )
    made: dict[str, Any] = {}
    for name, fields in _FIELDS.items():
        outer, _, inner = name.partition(".")
        place = made[outer].nested_type if inner else file.message_type
        message = made[name] = place.add(name=inner or outer)
        message.options.map_entry = bool(inner)
        for field in fields.split(", "):
            _add_field(message, *field.split())
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _FIELDS
    }


def _add_field(message: Any, number: str, name: str, kind: str) -> None:
    plain = kind.rstrip("*|")
    field = message.field.add(name=name, number=int(number))
    scalar = f"TYPE_{plain.upper()}"
    if scalar in _SCALARS:
        field.type = descriptor_pb2.FieldDescriptorProto.Type.Value(scalar)
    else:
        field.type = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".{plain}" if plain.startswith("google.") else f".{_PACKAGE}.{plain}"
    field.label = field.LABEL_REPEATED if kind.endswith("*") else field.LABEL_OPTIONAL
    if kind.endswith("|"):
        if not message.oneof_decl:
            message.oneof_decl.add(name="kind")
        field.oneof_index = 0


_MESSAGES = _made()
ProcessingRequest: Any = _MESSAGES["ProcessingRequest"]
ProcessingResponse: Any = _MESSAGES["ProcessingResponse"]


DESTINATION: Final = "x-gateway-destination-endpoint"
"""Header, and key of the dynamic metadata, that names the chosen pods."""
NAMESPACE: Final = "envoy.lb"
CHUNK_BYTES: Final = 62 * 1024
"""Maximum bytes of a body in one message: the protocol recommends at most 64 KiB with the
overhead."""
_STREAMED = (FULL_DUPLEX_STREAMED, GRPC)
"""Body modes in which only returned chunks are forwarded."""


def go_on(kind: str) -> Any:
    """Let the gateway forward headers or trailers unchanged; ``kind`` names the field."""
    reply = ProcessingResponse()
    getattr(reply, kind).SetInParent()
    return reply


def pass_body(kind: str, body: bytes, mode: int, *, is_last: bool) -> Iterator[Any]:
    """Let the gateway forward a body chunk unchanged. In a full-duplex mode that may take several
    messages; ``is_last``: it is the last chunk."""
    if mode not in _STREAMED:
        yield go_on(kind)
        return
    for at in range(0, max(1, len(body)), CHUNK_BYTES):
        reply = ProcessingResponse()
        streamed = getattr(reply, kind).response.body_mutation.streamed_response
        streamed.body = body[at : at + CHUNK_BYTES]
        streamed.end_of_stream = is_last and at + CHUNK_BYTES >= len(body)
        yield reply


def chosen(kind: str, endpoints: Iterable[str], *, has_answer: bool = True) -> Any:
    """Name the chosen pods, the first choice first, in reply to a request's headers, body or
    trailers. ``has_answer``: the gateway must send the answer's body, because it is useful."""
    named = ",".join(endpoints)
    reply = ProcessingResponse()
    reply.dynamic_metadata[NAMESPACE] = {DESTINATION: named}
    if kind == "request_trailers":
        reply.request_trailers.SetInParent()
        return reply
    response = getattr(reply, kind).response
    response.clear_route_cache = True  # as the reference picker: a route may depend on the header
    _set(response.header_mutation, {DESTINATION: named})
    if not has_answer:
        # Works only if the gateway allows a mode override. For a request without a body, this
        # does not change the request's own mode.
        reply.mode_override.response_body_mode = NONE
        reply.mode_override.response_trailer_mode = SKIP
    return reply


def refused(error: TidegateError, context: Context, now: float) -> Any:
    """Answer instead of a pod, in the format of Tidegate: status, headers and JSON. ``now`` is in
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
