"""``/v1/files``: the input and output files of batches."""

import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from aiohttp import (
    BadContentDispositionHeader,
    BadContentDispositionParam,
    BodyPartReader,
    MultipartReader,
    web,
)

from orchestrator.api.http.body import Patience
from orchestrator.api.http.fields import read_limit
from orchestrator.api.http.responses import json_response
from orchestrator.batches.api.served_lines import batches_of, owner_of
from orchestrator.batches.records import StoredBatch, StoredFile
from orchestrator.batches.shop import Upload
from orchestrator.errors import InvalidRequest, TidegateError, UnsupportedMediaType

N = TypeVar("N", StoredFile, StoredBatch)

T = TypeVar("T")

for _bent in (BadContentDispositionHeader, BadContentDispositionParam):
    warnings.filterwarnings("error", category=_bent)

PURPOSE = "batch"
_PIECE_BYTES = 2**16
_FIELD_BYTES = 256
_NAME_CHARS = 256
_MAX_PARTS = 16
_MAX_PER_PAGE = 10_000


async def create(request: web.Request) -> web.Response:
    """Upload a file of requests, one JSON object per line."""
    if request.content_type != "multipart/form-data":
        raise UnsupportedMediaType(
            "expected Content-Type: multipart/form-data with file and purpose; "
            "with curl -F purpose=batch -F file=@requests.jsonl",
            field="Content-Type",
        )
    async with batches_of(request).upload(owner_of(request)) as upload:
        form = await _read(request, upload)
        if form.name is None:
            raise InvalidRequest("file is missing: send it as a part named file", field="file")
        if form.fields.get("purpose") != PURPOSE:
            raise InvalidRequest(
                "purpose must be batch; no other purpose is supported", field="purpose"
            )
        file = await upload.finish(form.name, PURPOSE)
    return json_response(shape(file))


async def files(request: web.Request) -> web.Response:
    """List the key's files."""
    own = await batches_of(request).files(owner_of(request))
    purpose = request.query.get("purpose")
    own = [file for file in own if purpose in (None, file.purpose)]
    if request.query.get("order") == "asc":
        own.reverse()
    most = _MAX_PER_PAGE
    return json_response(page_of(own, request.query, shape, most=most, default=most))


async def retrieve(request: web.Request) -> web.Response:
    """Show the description of a file."""
    return json_response(shape(await _named(request)))


async def delete(request: web.Request) -> web.Response:
    """Delete a file."""
    name = request.match_info["file_id"]
    await batches_of(request).delete_file(owner_of(request), name)
    return json_response({"id": name, "object": "file", "deleted": True})


async def content(request: web.Request) -> web.StreamResponse:
    """Download the content of a file."""
    file = await _named(request)
    response = web.StreamResponse()
    response.content_type = "application/jsonl"
    response.content_length = file.bytes
    async for piece in batches_of(request).content(file.id):
        if not response.prepared:
            await response.prepare(request)
        await response.write(piece)
    if not response.prepared:
        await response.prepare(request)
    await response.write_eof()
    return response


def shape(file: StoredFile) -> dict[str, object]:
    created = int(file.made.unix)
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": created,
        "expires_at": created + int(file.keep_s),
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def page_of(
    entries: Sequence[N],
    query: Mapping[str, str],
    shape: Callable[[N], object],
    *,
    most: int,
    default: int = 20,
) -> dict[str, object]:
    """The page for ``query`` in OpenAI's format: ``limit`` entries after the entry with the id
    ``after``. ``shape`` renders each entry. Raises ``InvalidRequest``."""
    limit, begin = read_limit(query, default, most), 0
    if "after" in query:
        names = [entry.id for entry in entries]
        if query["after"] not in names:
            raise InvalidRequest("after must be the id of an entry of this list", field="after")
        begin = names.index(query["after"]) + 1
    page = entries[begin : begin + limit]
    return {
        "object": "list",
        "data": [shape(entry) for entry in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": begin + len(page) < len(entries),
    }


def routes() -> list[web.RouteDef]:
    return [
        web.post("/v1/files", create),
        web.get("/v1/files", files),
        web.get("/v1/files/{file_id}", retrieve),
        web.delete("/v1/files/{file_id}", delete),
        web.get("/v1/files/{file_id}/content", content),
    ]


class _Form(NamedTuple):
    name: str | None
    """Name of the file; None if the body had no file."""
    fields: Mapping[str, str]


class _Parts:
    """The parts of the body. All errors are ``InvalidRequest`` and quote none of the body's bytes.
    aiohttp itself raises many kinds of errors and logs the header in warnings."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._patience = Patience()
        self._reader: MultipartReader | None = None

    async def next(self) -> BodyPartReader | None:
        if self._reader is None:
            self._reader = await self._read(self._request.multipart())
        part = await self._read(self._reader.next())
        if isinstance(part, MultipartReader):
            raise InvalidRequest("a part of the body is multipart itself; send plain parts")
        return part

    async def piece(self, part: BodyPartReader, size: int) -> bytes:
        piece = await self._read(part.read_chunk(size))
        self._patience.came(len(piece))
        return piece

    async def names(self, part: BodyPartReader) -> tuple[str, str | None]:
        """Name of a part and of its file."""

        async def read() -> tuple[str, str | None]:
            return _text(part.name or ""), part.filename and _text(part.filename)

        return await self._read(read())

    async def _read(self, reading: Awaitable[T]) -> T:
        try:
            return await self._patience.read(reading)
        except (TidegateError, ConnectionError):
            raise
        except Exception:
            raise InvalidRequest(
                "the body is not multipart/form-data as in RFC 7578, with the boundary of its "
                "Content-Type and a Content-Disposition in each part; "
                "with curl -F purpose=batch -F file=@requests.jsonl"
            ) from None


async def _read(request: web.Request, upload: Upload) -> _Form:
    """Write the body's file to ``upload``. The parts may be in any order."""
    name, fields, parts = None, dict[str, str](), _Parts(request)
    for _ in range(_MAX_PARTS):
        part = await parts.next()
        if part is None:
            return _Form(name, fields)
        field, filename = await parts.names(part)
        if field == "file" and name is None:
            name = (filename or "file")[:_NAME_CHARS]
            while piece := await parts.piece(part, _PIECE_BYTES):
                await upload.write(piece)
        else:
            value = await parts.piece(part, _FIELD_BYTES)
            fields[field] = value.decode(errors="replace").strip()
    raise InvalidRequest(f"the body has more than {_MAX_PARTS} parts")


def _text(header: str) -> str:
    """The header as valid text: aiohttp represents bytes that are not UTF-8 as half surrogates."""
    return header.encode(errors="surrogateescape").decode(errors="replace")


async def _named(request: web.Request) -> StoredFile:
    name = request.match_info["file_id"]
    return await batches_of(request).file(owner_of(request), name)
