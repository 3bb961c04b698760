"""The page's files over HTTP: who may load them, and what a browser is told about them."""

import posixpath
import re

from orchestrator.api.page import extension
from tests.orchestrator.conftest import Service
from tests.support.cases import for_each

OWN = sorted(name for name in extension._FILES if not name.startswith("vendor/"))


async def test_it_is_there_and_not_sent_twice(service: Service) -> None:
    async with service.http.get("/") as response:
        assert response.status == 200
        assert response.content_type == "text/html"
        assert "<title>Tidegate</title>" in await response.text()
        etag = response.headers["ETag"]
    async with service.http.get("/", headers={"If-None-Match": etag}) as response:
        assert (response.status, await response.read()) == (304, b"")
        assert response.headers["Cache-Control"] == "no-cache"
    async with service.http.head("/") as response:
        assert (response.status, await response.read()) == (200, b"")


async def test_it_may_load_and_ask_this_service_only(service: Service) -> None:
    async with service.http.get("/") as response:
        policy = response.headers["Content-Security-Policy"].split("; ")
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Referrer-Policy"] == "no-referrer"
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "require-trusted-types-for 'script'" in policy
    allowed = {word for directive in policy for word in directive.split()[1:]}
    assert allowed == {"'none'", "'self'", "'script'", "blob:"}
    assert "media-src blob:" in policy


async def test_all_that_its_files_name_is_served(service: Service) -> None:
    named = {"/"}
    for name in OWN:
        text = extension._FILES[name].decode()
        named |= set(re.findall(r'(?:src|href)="(/page/[^"]+)"', text))
        named |= set(re.findall(r'data-module="([^"]+)"', text))
        imported = re.findall(r'from "(\.[^"]+)"', text)
        named |= {posixpath.normpath(f"/page/{name}/../{file}") for file in imported}
    assert len(named) > 10
    for path in named:
        async with service.http.get(path) as response:
            assert response.status == 200, path
            kind = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
            assert response.content_type == kind.get(path.rpartition(".")[2], "text/html")


@for_each("name", OWN)
def test_no_file_of_ours_names_another_host(name: str) -> None:
    urls = re.findall(
        r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}[^\s\"']*", extension._FILES[name].decode()
    )
    assert set(urls) <= {"http://www.w3.org/2000/svg"}


@for_each("path", ["/page/none.js", "/page/../auth.py", "/page/%2e%2e/page.py"])
async def test_no_other_file_is_served(service: Service, path: str) -> None:
    await service.ask("GET", path, 404)
