"""Files served from memory, at the client's pace."""

import asyncio

from aiohttp import web

from orchestrator.api.http.event_stream import CLIENT_TIMEOUT_S

_PIECE = 64 * 1024
"""Bytes that a slow client must read within its time limit."""


async def send_file(
    request: web.Request, data: bytes, name: str, content_type: str, etag: str
) -> web.StreamResponse:
    """Answer GET or HEAD with ``data``. ``name`` and ``etag`` are ours, never a client's."""
    headers = {
        "Content-Type": content_type,
        "Content-Disposition": f'inline; filename="{name}"',
        "ETag": f'"{etag}"',
        "Cache-Control": "private, no-transform",
        "X-Content-Type-Options": "nosniff",
    }
    if any(tag.value in ("*", etag) for tag in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    response = web.StreamResponse(headers=headers)
    response.content_length = len(data)
    await response.prepare(request)
    if request.method != "HEAD":
        await _write(response, data)
    await response.write_eof()
    return response


async def _write(response: web.StreamResponse, data: bytes) -> None:
    """Write ``data``. Raises ``ConnectionResetError`` for a client that reads nothing."""
    try:
        for start in range(0, len(data), _PIECE):
            async with asyncio.timeout(CLIENT_TIMEOUT_S):
                await response.write(data[start : start + _PIECE])
    except TimeoutError:
        raise ConnectionResetError("the client reads too slowly") from None
