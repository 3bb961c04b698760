"""Files served from memory: whole, or one range of bytes (RFC 9110, section 14), at the client's
pace."""

import asyncio

from aiohttp import web

from orchestrator.api.http.event_stream import CLIENT_TIMEOUT_S

_PIECE = 64 * 1024
"""Bytes per chunk, which even a slow client must read within its time limit."""


async def send_file(
    request: web.Request, data: bytes, name: str, content_type: str, etag: str
) -> web.StreamResponse:
    """Answer GET or HEAD with ``data``. ``name`` and ``etag`` are ours, never a client's."""
    headers = {
        "Content-Type": content_type,
        "Content-Disposition": f'inline; filename="{name}"',
        "Accept-Ranges": "bytes",
        "ETag": f'"{etag}"',
        "Cache-Control": "private, no-transform",
        "X-Content-Type-Options": "nosniff",
    }
    if any(tag.value in ("*", etag) for tag in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    span = _span(request, len(data), headers["ETag"])
    if not span:
        return web.Response(status=416, headers=headers | {"Content-Range": f"bytes */{len(data)}"})
    status = 200
    if len(span) < len(data):
        status = 206
        headers["Content-Range"] = f"bytes {span.start}-{span.stop - 1}/{len(data)}"
    response = web.StreamResponse(status=status, headers=headers)
    response.content_length = len(span)
    await response.prepare(request)
    if request.method != "HEAD":
        await _write(response, data, span)
    await response.write_eof()
    return response


async def _write(response: web.StreamResponse, data: bytes, span: range) -> None:
    """Write a part of ``data``. Raises ``ConnectionResetError`` if the client does not read."""
    try:
        for start in span[::_PIECE]:
            async with asyncio.timeout(CLIENT_TIMEOUT_S):
                await response.write(data[start : min(start + _PIECE, span.stop)])
    except TimeoutError:
        raise ConnectionResetError("the client reads too slowly") from None


def _span(request: web.Request, size: int, etag: str) -> range:
    """The requested range; empty if no part of it exists. For an invalid range, or several ranges,
    it is the whole file, as the RFC allows."""
    everything = range(size)
    try:
        asked = request.http_range
    except ValueError:
        return everything
    unless_changed = request.headers.get("If-Range")
    if unless_changed is not None and unless_changed.strip() != etag:
        return everything
    return everything[asked]
