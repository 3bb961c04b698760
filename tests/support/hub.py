"""A model hub on loopback that can misbehave, as ``HF_ENDPOINT`` would name one."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from aiohttp import web

COMMIT = "c" * 40


@dataclass
class Faults:
    """What it does wrong. ``cut_after``: the connection ends after so many bytes of an answer, so
    many ``times``, per file."""

    cut_after: int | None = None
    corrupt: int = 0
    """So many whole answers have a wrong byte."""
    stall_after: int | None = None
    times: int = 1
    no_ranges: bool = False
    missing: frozenset[str] = frozenset()
    statuses: list[int] = field(default_factory=list)
    """Answered first, one each."""
    false_length: bool = False
    redirect: bool = False
    endless_redirect: bool = False


def not_found(what: str, code: str) -> web.Response:
    error = {"error": f"{what} not found"}
    return web.json_response(error, status=404, headers={"X-Error-Code": code})


class Hub:
    """``files`` of one repository, ``org/model``. What is large is told as LFS tells it."""

    def __init__(self, files: Mapping[str, bytes], faults: Faults | None = None) -> None:
        self.files = dict(files)
        self.faults = faults or Faults()
        self.requests: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.tokens: list[tuple[str, str | None]] = []
        self.license = "apache-2.0"
        self.large_bytes = 1000
        self.closing = asyncio.Event()
        """Ends what stalls."""

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/api/models/{org}/{name}", self._info),
                web.get("/api/models/{org}/{name}/revision/{revision}", self._info),
                web.get("/{org}/{name}/resolve/{revision}/{path:.+}", self._file),
                web.get("/cdn/{path:.+}", self._content),
            ]
        )
        return app

    async def _info(self, request: web.Request) -> web.Response:
        if request.match_info["name"] != "model":
            return not_found("Repository", "RepoNotFound")
        if request.match_info.get("revision", "main") not in ("main", COMMIT):
            return not_found("Revision", "RevisionNotFound")
        siblings = []
        for path, content in self.files.items():
            git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            sibling: dict[str, object] = {"rfilename": path, "size": len(content), "blobId": git}
            if len(content) >= self.large_bytes:
                digest = hashlib.sha256(content).hexdigest()
                sibling["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 130}
            siblings.append(sibling)
        return web.json_response(
            {
                "id": "org/model",
                "sha": COMMIT,
                "siblings": siblings,
                "tags": [f"license:{self.license}"],
                "cardData": {"license": self.license},
                "private": False,
                "downloads": 1,
                "likes": 0,
            }
        )

    async def _file(self, request: web.Request) -> web.StreamResponse:
        path = request.match_info["path"]
        self.tokens.append((request.path, request.headers.get("Authorization")))
        if self.faults.endless_redirect:
            raise web.HTTPFound(request.path)
        if self.faults.redirect:
            # another origin: localhost is another host than 127.0.0.1
            raise web.HTTPFound(f"http://localhost:{request.url.port}/cdn/{path}")
        return await self._content(request)

    async def _content(self, request: web.Request) -> web.StreamResponse:
        path, faults = request.match_info["path"], self.faults
        self.tokens.append((request.path, request.headers.get("Authorization")))
        self.requests[path] += 1
        if path in faults.missing:
            return web.Response(status=404)
        if faults.statuses:
            return web.Response(status=faults.statuses.pop(0))
        content = self.files[path]
        begin, end, status = 0, len(content), 200
        asked = request.headers.get("Range")
        if asked is not None and not faults.no_ranges:
            first, last = asked.removeprefix("bytes=").split("-")
            begin, end, status = int(first), int(last) + 1 if last else len(content), 206
        body = bytearray(content[begin:end])
        if faults.corrupt and len(content) >= self.large_bytes and begin == 0:
            faults.corrupt -= 1
            body[-1] ^= 1
        answer = web.StreamResponse(status=status)
        answer.content_length = len(body)
        if status == 206:
            answer.headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
        elif faults.false_length:
            answer.content_length = len(body) - 1
            body = body[:-1]
        await answer.prepare(request)
        stop = faults.cut_after if faults.cut_after is not None else faults.stall_after
        if stop is not None and len(body) > stop and self.requests[path] <= faults.times:
            self.sent[path] += stop
            await answer.write(bytes(body[:stop]))
            if faults.stall_after is not None:
                await self.closing.wait()
            assert request.transport is not None
            request.transport.close()
            return answer
        self.sent[path] += len(body)
        await answer.write(bytes(body))
        await answer.write_eof()
        return answer
