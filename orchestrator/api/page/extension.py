"""``/``: the live page, a playground and a board. The files in ``static/`` are sent as they are.

They contain no secrets and need no key: the page asks the user for a key and sends it with each
call. Its ``Content-Security-Policy`` allows connections only to this service.
"""

import hashlib
from pathlib import Path, PurePosixPath

from aiohttp import web

import orchestrator
from orchestrator.api.auth import PAGE_FILES
from orchestrator.errors import NotFound
from orchestrator.extension import Extension
from protocol import excerpt

_STATIC = Path(__file__).with_name("static")
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "media-src blob:",  # a clip: fetched with the key, which <video> cannot send
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Cached but always revalidated: after an upgrade, old and new files do not work together.
    "Cache-Control": "no-cache",
}


def _files_in(folder: Path, below: str = "") -> dict[str, bytes]:
    return {
        below + path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _all_files() -> dict[str, bytes]:
    """The page's files, including views of optional rooms. A view is a folder ``page`` with
    ``view.css`` and ``view.html``: a ``<section>`` with a ``data-module`` that exports ``View`` and
    ``Card``."""
    found = _files_in(_STATIC)
    views = sorted(Path(orchestrator.__file__).parents[1].glob("*/page/view.html"))
    sections = [view.read_text("utf-8") for view in views]
    styles = []
    for view in views:
        room = view.parts[-3]
        found |= _files_in(view.parent, f"{room}/")
        styles.append(f'  <link rel="stylesheet" href="{PAGE_FILES}/{room}/view.css">\n')
    index = found["index.html"].decode()
    index = index.replace("<!-- views of rooms -->\n", "\n".join(sections))
    index = index.replace("<!-- styles of rooms -->\n", "".join(styles))
    return found | {"index.html": index.encode()}


_FILES = _all_files()
"""Read once. Requests never open files, and can only name these."""


async def file(request: web.Request) -> web.Response:
    name = request.match_info.get("name", "index.html")
    body = _FILES.get(name)
    if body is None:
        raise NotFound(f"the page has no file {excerpt(name, 128)}")
    etag = hashlib.sha256(body).hexdigest()[:32]
    if any(tag.value in ("*", etag) for tag in request.if_none_match or ()):
        answer = web.Response(status=304, headers=_HEADERS)
    else:
        kind = _TYPES.get(PurePosixPath(name).suffix, "text/plain")
        charset = "utf-8" if kind.startswith("text/") else None
        answer = web.Response(body=body, content_type=kind, charset=charset, headers=_HEADERS)
    answer.etag = etag
    return answer


class PageRoom(Extension):
    def attach(self, app: web.Application) -> None:
        app.add_routes([web.get("/", file), web.get(f"{PAGE_FILES}/{{name:.+}}", file)])
