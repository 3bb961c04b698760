"""One request's exchange with the gateway, exactly as in Envoy's protocol.

::

    request head ─▶ body … ─▶ trailers      answers to each of these keep their order, and what
    response head ─▶ body … ─▶ trailers     Envoy expects depends on the mode of the body

=====================  ===========================================================================
mode of the body       a pod is named
=====================  ===========================================================================
FULL_DUPLEX_STREAMED   in answer to the head, once all of the body is here: then the body is sent
                       back, and then trailers are answered
BUFFERED, …_PARTIAL    in answer to the body, whose changes to the head count
NONE, STREAMED, GRPC   in answer to the head, which is forwarded at once: the body comes late, or
                       not at all
no body                in answer to the head
=====================  ===========================================================================

Envoy states the mode in its first message. If it does not, the endpoint picker protocol implies the
first mode. A body over the limit is not read any further. Depending on ``failure_mode``, the picker
chooses a pod without it and passes the body on as it arrives, or refuses the request.

This module does no I/O: messages in, messages out.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

from google.protobuf.message import DecodeError
from multidict import CIMultiDict

from orchestrator.api import dialects
from orchestrator.api.http.body import ALL_BODIES_BYTES
from orchestrator.api.http.context import Context, context_of
from orchestrator.clock import instant
from orchestrator.errors import BodyTooLarge, NoCapacity, TidegateError
from orchestrator.telemetry.log import fields, service_log
from picker.answer import AnswerReader
from picker.asked import read_asked
from picker.ext_proc import (
    BUFFERED,
    BUFFERED_PARTIAL,
    FULL_DUPLEX_STREAMED,
    NAMESPACE,
    ProcessingRequest,
    chosen,
    go_on,
    pass_body,
    refused,
)
from picker.picker import EndpointPicker, Picked

DIALECTS: Final = [served.conventions for served in dialects.SERVED]
MOST_BODY_BYTES: Final = 4 * 2**20
"""Maximum size of a request body to read."""
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
SERVED: Final = "x-gateway-destination-endpoint-served"


class GatewayError(ValueError):
    """A message that Envoy's protocol does not allow, or not at this point."""


class RequestStream:
    """One stream from the gateway: one request and its answer.

    ``take`` returns the replies to a message; call ``close`` at any end of the stream.
    """

    def __init__(self, picker: EndpointPicker) -> None:
        self.is_over = False
        """Whether the request was refused, so that the stream ends after these replies."""
        self._picker = picker
        self._headers: CIMultiDict[str] = CIMultiDict()
        self._context: Context | None = None
        self._subset: Sequence[str] | None = None
        """Pods that the gateway allows; None if it allows all."""
        self._request_mode = self._answer_mode = FULL_DUPLEX_STREAMED
        self._body: deque[bytes] = deque()
        """The received chunks, unchanged: one buffer would use more memory."""
        self._size = 0
        self._holds_head = False
        """Whether the headers have not been answered yet."""
        self._picked: Picked | None = None
        self._is_picked = False
        self._answer: AnswerReader | None = None
        self._takes: dict[str, Callable[[Any], Iterable[Any]]] = {
            "request_headers": self._request_head,
            "request_body": self._request_body,
            "request_trailers": self._request_trailers,
            "response_headers": self._answer_head,
            "response_body": self._answer_body,
            "response_trailers": self._answer_trailers,
        }

    def take(self, encoded: bytes) -> Iterable[Any]:
        """The replies to one message, in their order. Raises ``GatewayError``."""
        try:
            message = ProcessingRequest.FromString(encoded)
        except DecodeError:
            raise GatewayError("a message that is no ProcessingRequest in protobuf") from None
        if message.observability_mode:
            return []  # in observability mode, the gateway expects no reply
        kind = message.WhichOneof("kind")
        if kind is None:
            raise GatewayError("a message without a head, a body or trailers")
        if self._context is None:
            self._begin(message)
        assert self._context is not None
        try:
            return self._takes[kind](message)
        except TidegateError as error:
            self.is_over = True
            self.close()
            service_log.info(
                "request refused: %s",
                error.code,
                extra=fields(correlation_id=self._context.correlation_id, status=error.status),
            )
            return [refused(error, self._context, self._picker.clock.now())]

    def close(self) -> None:
        """The stream is over: the answer ended, one side hung up, or the gateway sends no more.
        Idempotent."""
        self._count(-self._size)
        self._body.clear()
        picked, self._picked = self._picked, None
        if picked is None:
            return
        if self._answer is None:
            self._picker.lost_sight(picked)
        else:
            self._picker.ended(picked, None)

    # ── the request ──────────────────────────────────────────────────────────────────────────

    def _begin(self, message: Any) -> None:
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._answer_mode = message.protocol_config.response_body_mode
        if message.HasField("request_headers"):
            self._headers = _read_headers(message.request_headers.headers)
        path = self._headers.get(":path", "").partition("?")[0]
        self._context = context_of(path, self._headers, instant(self._picker.clock), DIALECTS)
        self._subset = _texts_in(message, SUBSET_NAMESPACE, SUBSET)

    def _request_head(self, message: Any) -> list[Any]:
        if message.request_headers.end_of_stream:
            # Without a body nothing was generated, so there is nothing to learn.
            return [self._chosen("request_headers", None, has_answer=False)]
        if self._request_mode in (BUFFERED, BUFFERED_PARTIAL):
            return [go_on("request_headers")]
        if self._request_mode == FULL_DUPLEX_STREAMED:
            self._holds_head = True
            return []
        return [self._chosen("request_headers", None)]

    def _request_body(self, message: Any) -> Iterable[Any]:
        body, is_last = message.request_body.body, message.request_body.end_of_stream
        if self._request_mode in (BUFFERED, BUFFERED_PARTIAL) and not self._is_picked:
            return [self._chosen("request_body", body if self._fits(len(body)) else None)]
        if not self._holds_head:
            return list(pass_body("request_body", body, self._request_mode, is_last=is_last))
        self._body.append(body)
        self._count(len(body))
        fits = self._fits(self._size)
        if fits and not is_last:
            return []
        head = self._chosen("request_headers", b"".join(self._body) if fits else None)
        return chain([head], self._sent_back(is_last=is_last))

    def _request_trailers(self, message: Any) -> Iterable[Any]:
        if self._holds_head:
            head = self._chosen("request_headers", b"".join(self._body))
            body = self._sent_back(is_last=False) if self._size else ()
            return chain([head], body, [go_on("request_trailers")])
        if not self._is_picked:  # a mode that waits for a body, but there was none
            return [self._chosen("request_trailers", None)]
        return [go_on("request_trailers")]

    def _fits(self, size: int) -> bool:
        """Whether to read a body of ``size`` bytes. Raises ``BodyTooLarge`` or ``NoCapacity`` if an
        unread body must be refused."""
        has_room = self._picker.held_bytes <= ALL_BODIES_BYTES
        if self._picker.section.failure_mode == "closed":
            if size > MOST_BODY_BYTES:
                raise BodyTooLarge(
                    f"the body has more than {MOST_BODY_BYTES} bytes, the limit of the endpoint "
                    "picker: send less"
                )
            if not has_room:
                raise NoCapacity("the endpoint picker holds too many incomplete bodies")
        return size <= MOST_BODY_BYTES and has_room

    def _sent_back(self, *, is_last: bool) -> Iterator[Any]:
        """Replies that release the held body, produced as the gateway reads them; until then the
        body counts as held."""
        pieces = self._body or deque([b""])
        while pieces:
            ends = is_last and len(pieces) == 1
            yield from pass_body("request_body", pieces[0], self._request_mode, is_last=ends)
            if pieces:  # the stream may have been closed by now
                self._count(-len(pieces.popleft()))

    def _count(self, more: int) -> None:
        self._size += more
        self._picker.held_bytes += more

    def _chosen(self, kind: str, body: bytes | None, *, has_answer: bool = True) -> Any:
        """The reply that names the pods. Raises ``TidegateError`` if there is no pod."""
        assert self._context is not None
        asked = read_asked(self._headers, body, self._context, self._picker.settings.deadlines)
        picked = self._picked = self._picker.pick(asked, self._subset)
        self._is_picked, self._holds_head = True, False
        return chosen(kind, picked.endpoints, has_answer=has_answer)

    # ── the answer ───────────────────────────────────────────────────────────────────────────

    def _answer_head(self, message: Any) -> list[Any]:
        head = message.response_headers
        headers = _read_headers(head.headers)
        self._answer = AnswerReader(
            headers.get("content-type", ""), headers.get("content-encoding", "")
        )
        served = _texts_in(message, NAMESPACE, SERVED)
        if self._picked is not None and served:
            self._picker.served_by(self._picked, served[0])
        if head.end_of_stream:
            self._answered()
        return [go_on("response_headers")]

    def _answer_body(self, message: Any) -> list[Any]:
        body = message.response_body
        if self._picked is not None and self._answer is not None:
            self._answer.feed(body.body)
            self._picker.progressed(self._picked, self._answer.tokens)
        if body.end_of_stream:
            self._answered()
        return list(
            pass_body("response_body", body.body, self._answer_mode, is_last=body.end_of_stream)
        )

    def _answer_trailers(self, message: Any) -> list[Any]:
        self._answered()
        return [go_on("response_trailers")]

    def _answered(self) -> None:
        picked, self._picked = self._picked, None
        if picked is not None and self._answer is not None:
            self._picker.ended(picked, self._answer.end())


def _read_headers(message: Any) -> CIMultiDict[str]:
    """Headers in the common format here. Bytes that are not UTF-8 are replaced."""
    return CIMultiDict(
        (one.key, one.raw_value.decode(errors="replace") if one.raw_value else one.value)
        for one in message.headers
    )


def _texts_in(message: Any, namespace: str, key: str) -> list[str] | None:
    """Texts of a metadata entry: one, several with commas, or a list; None without the entry."""
    entries = message.metadata_context.filter_metadata
    if namespace not in entries or key not in entries[namespace].fields:
        return None
    value = entries[namespace].fields[key]
    texts = [one.string_value for one in value.list_value.values] or [value.string_value]
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]
