"""``/v1/messages/batches``: Anthropic's Message Batches, over the same core as OpenAI's."""

import asyncio
import hashlib
import re
from datetime import UTC, datetime

import msgspec
from aiohttp import web

from orchestrator.api.anthropic.routes import check_version
from orchestrator.api.http.batch_lines import batches_of, owner_of
from orchestrator.api.http.body import BODY_TIMEOUT_S, require_json
from orchestrator.api.http.contents import stream_files
from orchestrator.api.http.paging import page_of
from orchestrator.api.http.responses import json_response
from orchestrator.batches.elements import Elements, NoElements
from orchestrator.batches.records import BatchLine, LineOutcome, LineResult, Status, StoredBatch
from orchestrator.batches.service import new_batch, new_id, read_window
from orchestrator.batches.upload import Upload
from orchestrator.errors import BodyTooSlow, InvalidRequest, NotFound

DIALECT = "anthropic"
ENDPOINT = "/v1/messages"
_WINDOW = "24h"
_CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)
_MAX_PER_PAGE = 1000
_PIECE_BYTES = 2**18
_UNSERVED = {LineOutcome.EXPIRED: "expired", LineOutcome.CANCELLED: "canceled"}


class BatchItem(msgspec.Struct, frozen=True):
    """One request of a batch: ``params`` is a body of ``/v1/messages``."""

    custom_id: str
    params: msgspec.Raw


class MessageBatchRequest(msgspec.Struct, frozen=True):
    """Body of a new batch. ``completion_window``, which Anthropic's API lacks, is a number and one
    of s m h d."""

    requests: list[BatchItem]
    completion_window: str = _WINDOW


_item_decoder = msgspec.json.Decoder(BatchItem)
_rest_decoder = msgspec.json.Decoder(MessageBatchRequest)


async def create(request: web.Request) -> web.Response:
    """Create a batch of messages."""
    check_version(request.headers)
    batches, owner = batches_of(request), owner_of(request)
    require_json(request)
    taken = _Taken(batches.config.line_bytes, batches.config.max_lines)
    async with batches.upload(owner) as upload:
        try:
            await _read(request, taken, upload)
            rest = taken.finish()
        except NoElements as error:
            raise InvalidRequest(str(error), field="requests") from None
        batch = new_batch(
            batches.shop.time,
            id=new_id("msgbatch_"),
            owner=owner,
            dialect=DIALECT,
            input_id=upload.id,
            endpoint=ENDPOINT,
            window=rest.completion_window,
            window_s=read_window(rest.completion_window),
            keep_s=batches.config.keep_s,
            metadata={},
        )
        await upload.keep()
        try:
            return json_response(shape(await batches.create(batch)))
        except BaseException:
            upload.give_up()
            raise


async def batches(request: web.Request) -> web.Response:
    """The key's batches, the newest first."""
    own = await batches_of(request).batches(owner_of(request), DIALECT)
    page = page_of(own, request.query, most=_MAX_PER_PAGE, after="after_id", before="before_id")
    return json_response(page.body(shape))


async def retrieve(request: web.Request) -> web.Response:
    """One batch, and how far it is."""
    return json_response(shape(await _named(request)))


async def cancel(request: web.Request) -> web.Response:
    """Cancel a batch: no more of its messages are begun; results so far are kept."""
    name = request.match_info["batch_id"]
    return json_response(shape(await batches_of(request).cancel(owner_of(request), DIALECT, name)))


async def delete(request: web.Request) -> web.Response:
    """Delete a batch that has ended, with its results."""
    name = request.match_info["batch_id"]
    await batches_of(request).delete(owner_of(request), DIALECT, name)
    return json_response({"id": name, "type": "message_batch_deleted"})


async def results(request: web.Request) -> web.StreamResponse:
    """The result of each message, one JSON object per line, in any order."""
    batch = await _named(request)
    if not batch.status.is_over:
        raise NotFound("the batch has not ended; its results can be asked for once it has")
    files = batches_of(request).shop.files
    own = [files[name] for name in (batch.output_id, batch.errors_id) if name in files]
    size = sum(file.bytes for file in own)
    return await stream_files(request, [file.id for file in own], "application/x-jsonl", size)


def routes() -> list[web.RouteDef]:
    at = f"{ENDPOINT}/batches"
    return [
        web.post(at, create),
        web.get(at, batches),
        web.get(f"{at}/{{batch_id}}", retrieve),
        web.delete(f"{at}/{{batch_id}}", delete),
        web.post(f"{at}/{{batch_id}}/cancel", cancel),
        web.get(f"{at}/{{batch_id}}/results", results),
    ]


def shape(batch: StoredBatch) -> dict[str, object]:
    is_over, times = batch.status.is_over, batch.times
    status = "canceling" if batch.status is Status.CANCELLING else "in_progress"
    counts = {
        "succeeded": batch.count(LineOutcome.SUCCEEDED),
        "errored": batch.count(LineOutcome.ERRORED),
        "canceled": batch.count(LineOutcome.CANCELLED),
        "expired": batch.count(LineOutcome.EXPIRED),
    }
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "ended" if is_over else status,
        "request_counts": {"processing": batch.total - sum(counts.values()), **counts},
        "created_at": _rfc3339(batch.made.unix),
        "expires_at": _rfc3339(batch.made.unix + batch.window_s),
        "cancel_initiated_at": _rfc3339(times.get(Status.CANCELLING.value)),
        "ended_at": _rfc3339(times.get(batch.status.value)) if is_over else None,
        "archived_at": None,
        # Relative, so that it works through whatever proxy the client came by; SDKs accept it.
        "results_url": f"{ENDPOINT}/batches/{batch.id}/results" if is_over else None,
    }


def entry(
    batch: StoredBatch, line: BatchLine, kind: LineOutcome, answer: LineResult | None
) -> bytes:
    """One line of the results."""
    result: dict[str, object]
    if kind in _UNSERVED:
        result = {"type": _UNSERVED[kind]}
    else:
        assert answer is not None
        name, what = (
            ("message", "succeeded") if kind is LineOutcome.SUCCEEDED else ("error", "errored")
        )
        result = {"type": what, name: msgspec.Raw(answer.body)}
    return msgspec.json.encode({"custom_id": line.custom_id, "result": result}) + b"\n"


class _Taken:
    """The requests of a body, as lines of a batch's input."""

    def __init__(self, most_bytes: int, most_lines: int) -> None:
        self._elements = Elements(most_bytes)
        self._most_lines = most_lines
        self._ids: set[bytes] = set()

    def feed(self, piece: bytes) -> bytes:
        """Lines of the requests that end in ``piece``. Raises ``NoElements``."""
        return b"".join(self._line(element) for element in self._elements.feed(piece))

    def finish(self) -> MessageBatchRequest:
        """The rest of the body, apart from its requests. Raises ``NoElements``."""
        try:
            rest = _rest_decoder.decode(self._elements.rest)
        except msgspec.ValidationError as error:
            raise NoElements(f"the body is not what is expected: {error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise NoElements("the body is not a JSON object") from None
        if rest.requests or not self._ids:
            raise NoElements("requests must be a list of at least one object, and there once")
        return rest

    def _line(self, element: bytes) -> bytes:
        place = len(self._ids)
        try:
            item = _item_decoder.decode(element.decode())
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise NoElements(f"requests.{place}: {error}") from None
        if place >= self._most_lines:
            raise NoElements(f"there are more than {self._most_lines} requests: split them")
        if not _CUSTOM_ID.fullmatch(item.custom_id):
            raise NoElements(
                f"requests.{place}.custom_id must be 1 to 64 letters, digits or any of _ -"
            )
        digest = hashlib.blake2b(item.custom_id.encode(), digest_size=16).digest()
        if digest in self._ids:
            raise NoElements(f"requests.{place}.custom_id: {item.custom_id} is there before")
        self._ids.add(digest)
        line = {
            "custom_id": item.custom_id,
            "method": "POST",
            "url": ENDPOINT,
            # A body may contain line breaks; in a file of lines it must not.
            "body": msgspec.Raw(msgspec.json.format(item.params, indent=-1)),
        }
        return msgspec.json.encode(line) + b"\n"


async def _read(request: web.Request, taken: _Taken, upload: Upload) -> None:
    batches, piece = batches_of(request), bytearray()
    while True:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                some = await request.content.readany()
        except TimeoutError:
            raise BodyTooSlow(f"the body stopped for {BODY_TIMEOUT_S:g} s") from None
        except web.RequestPayloadError:
            raise InvalidRequest("the body is not framed as the headers say") from None
        piece += some
        if piece and (not some or len(piece) >= _PIECE_BYTES):
            lines = await batches.shop.block(taken.feed, bytes(piece))
            piece.clear()
            if lines:
                await upload.write(lines)
        if not some:
            return


async def _named(request: web.Request) -> StoredBatch:
    name = request.match_info["batch_id"]
    return await batches_of(request).batch(owner_of(request), DIALECT, name)


def _rfc3339(unix: float | None) -> str | None:
    return None if unix is None else datetime.fromtimestamp(unix, UTC).isoformat()
