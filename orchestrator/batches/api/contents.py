"""Files of batches, as answers."""

from collections.abc import Iterable

from aiohttp import web

from orchestrator.batches.api.served_lines import batches_of


async def stream_files(
    request: web.Request, names: Iterable[str], content_type: str, size: int
) -> web.StreamResponse:
    """Stream the content of files, one after the other, ``size`` bytes in all."""
    response = web.StreamResponse()
    response.content_type = content_type
    response.content_length = size
    for name in names:
        async for piece in batches_of(request).content(name):
            if not response.prepared:
                await response.prepare(request)
            await response.write(piece)
    if not response.prepared:
        await response.prepare(request)
    await response.write_eof()
    return response
