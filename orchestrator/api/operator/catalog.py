"""``/v2/catalog``: models and engines on the orchestrator's machine (PV-5).

The catalogs are files, so this module never reads them on the event loop. Responses do not contain
paths of the machine.
"""

import asyncio
import base64
import hashlib
import re
import threading
import time
from collections.abc import Callable, Mapping
from email.utils import formatdate
from pathlib import Path, PurePath
from typing import Any, Final, Literal, NamedTuple

import msgspec
from aiohttp import web

from catalog.checks import verify_model
from catalog.engines import EngineCatalog, EngineEntry, verify_engine
from catalog.errors import ProvisionError
from catalog.manifests import now_ms
from catalog.models import ModelCatalog, ModelEntry, ModelState
from orchestrator.api.http.field_errors import must
from orchestrator.api.http.fields import read_limit
from orchestrator.api.http.responses import json_response
from orchestrator.errors import InvalidRequest, NotFound, Unavailable
from orchestrator.telemetry.log import service_log
from worker.priority import lower_priority

Kind = Literal["models", "engines"]

PAGE: Final = 50
MAX: Final = 200
NICENESS: Final = 10
"""Increment of a verification's nice value over the service's, as in nice(2)."""
_SETTLED_MS: Final = 2000
"""Age in ms below which a response has no ``Last-Modified``: the header has a resolution of one
second, and another change may follow in the same second."""


_FOLDERS: Final = re.compile(r"(?<![\w./:-])/(?:[^\s/]+/)*(?=[^\s/])")


class Verification(msgspec.Struct, frozen=True):
    """A verification: ``waiting``, ``running``, ``passed`` or ``failed``. Times are in Unix ms."""

    state: str
    asked_ms: int
    ended_ms: int | None = None
    problem: str = ""


_Seen = dict[tuple[Kind, str], Verification]
"""Verifications at one point in time."""


class _Listing(NamedTuple):
    changed_ms: int
    entries: list[dict[str, Any]]


class Verifications:
    """Reads the files of entries again, one entry at a time, on a thread with the lowest priority.
    The process does not wait for the thread at exit."""

    def __init__(self, home: Callable[[], Path]) -> None:
        self.states: _Seen = {}
        self.home = home
        """The state folder; it is only called on threads."""
        self._turn = threading.Lock()

    def ask(self, kind: Kind, id: str) -> Verification:
        """Verify an entry. No effect if its verification is already waiting or running."""
        known = self.states.get((kind, id))
        if known is not None and known.ended_ms is None:
            return known
        asked = self.states[kind, id] = Verification("waiting", now_ms())
        threading.Thread(
            target=self._verify, args=(kind, id, asked), name="tidegate-verify", daemon=True
        ).start()
        return asked

    def _verify(self, kind: Kind, id: str, asked: Verification) -> None:
        lower_priority(NICENESS)
        with self._turn:
            self.states[kind, id] = msgspec.structs.replace(asked, state="running")
            try:
                problem = self._problem(kind, id)
            except (ProvisionError, OSError) as error:
                problem = str(error)
            except Exception as error:  # an exception on this thread would be lost
                service_log.exception("cannot verify an entry of a catalog")
                problem = f"it cannot be verified: {type(error).__name__}"
            self.states[kind, id] = msgspec.structs.replace(
                asked,
                state="failed" if problem else "passed",
                ended_ms=now_ms(),
                # Each absolute path becomes its last name, or its part below the state folder.
                problem=_FOLDERS.sub("", problem.replace(f"{self.home()}/", "")),
            )

    def _problem(self, kind: Kind, id: str) -> str:
        home = self.home()
        if kind == "engines":
            return verify_engine(EngineCatalog(home).get(id))
        catalog = ModelCatalog(home)
        with catalog.claim(id):
            return verify_model(catalog, catalog.get(id), threads=1).problem


VERIFICATIONS = web.AppKey("verifications", Verifications)


def _listing(kind: Kind, home: Path, seen: _Seen) -> _Listing:
    """A catalog as shown. ``seen`` was taken before, because the catalog has the results."""
    entries: list[dict[str, Any]]
    if kind == "models":
        models = ModelCatalog(home).models()
        changed_ms, entries = models.changed_ms, [_model(entry) for entry in models.entries]
    else:
        engines = EngineCatalog(home).engines()
        changed_ms, entries = engines.changed_ms, [_engine(entry) for entry in engines.entries]
    for entry in entries:
        entry["verification"] = msgspec.to_builtins(seen.get((kind, entry["id"])))
    # During a verification, the last change is now.
    changes = (each.ended_ms or now_ms() for each in seen.values())
    return _Listing(max([changed_ms, *changes]), entries)


def _model(entry: ModelEntry) -> dict[str, Any]:
    source = entry.source if entry.source.startswith("hub:") else "local"
    return {**msgspec.to_builtins(entry), "bytes": entry.bytes, "source": source}


def _engine(entry: EngineEntry) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(entry)
    told.pop("binary", None)
    return told | {
        "build_ref": _without_folders(entry.build_ref),
        "build_flags": [_without_folders(flag) for flag in entry.build_flags],
        "artifacts": [PurePath(path).name for path in entry.artifacts],
        "digest": entry.digest,
        "compute_mode": entry.compute_mode,
    }


async def listing(request: web.Request) -> web.Response:
    """List the models or engines on the orchestrator's machine in pages, oldest first."""
    limit, after = read_limit(request.query, PAGE, MAX), _cursor(request)
    found = await _read(request)
    later = [entry for entry in found.entries if _key(entry) > after]
    next_cursor = None
    if len(later) > limit:
        key = _key(later[limit - 1]).encode()
        next_cursor = base64.urlsafe_b64encode(key).decode().rstrip("=")
    told = {_kind(request): later[:limit], "next_cursor": next_cursor}
    return _answer(request, told, found.changed_ms)


async def one(request: web.Request) -> web.Response:
    """Show one entry with its digests and state."""
    changed_ms, entry = await _one(request)
    return _answer(request, entry, changed_ms)


async def state(request: web.Request) -> web.Response:
    """Show whether an entry can be used, and the progress of its verification."""
    _, entry = await _one(request)
    names = ("id", "name", "engine", "state", "problem", "verified_ms", "verification")
    return _answer(request, {name: entry[name] for name in names if name in entry}, None)


async def verify(request: web.Request) -> web.Response:
    """Read every byte of an entry again. ``…/state`` shows the result. Idempotent."""
    kind, (_, entry) = _kind(request), await _one(request)
    if entry.get("state") == ModelState.STAGING.value:
        raise InvalidRequest(
            f"the model {entry['id']} is not complete, so it cannot be verified yet"
        )
    asked = request.app[VERIFICATIONS].ask(kind, entry["id"])
    body = {"id": entry["id"], "verification": msgspec.to_builtins(asked)}
    location = f"/v2/catalog/{kind}/{entry['id']}/state"
    return json_response(body, status=202, headers={"Location": location})


async def _one(request: web.Request) -> tuple[int, dict[str, Any]]:
    id = request.match_info["id"]
    found = await _read(request)
    for entry in found.entries:
        if entry["id"] == id:
            return found.changed_ms, entry
    raise NotFound(f"the catalog has no entry {id[:128]!r}")


def _kind(request: web.Request) -> Kind:
    return "models" if request.match_info["kind"] == "models" else "engines"


async def _read(request: web.Request) -> _Listing:
    verifications = request.app[VERIFICATIONS]
    seen = dict(verifications.states)
    try:
        return await asyncio.to_thread(lambda: _listing(_kind(request), verifications.home(), seen))
    except ProvisionError as error:
        service_log.warning("the catalog cannot be read: %s", error)
        raise Unavailable("the catalog cannot be read; see the service's log") from error


def _answer(request: web.Request, told: object, changed_ms: int | None) -> web.Response:
    """A response with validators, so that a client can ask for changes only (304 if there are
    none). ``changed_ms`` is None if the response also depends on more than the catalog."""
    body = msgspec.json.encode(told)
    tag = hashlib.sha256(body).hexdigest()[:32]
    headers = {"ETag": f'"{tag}"', "Cache-Control": "private, no-cache"}
    changed_s = None
    if changed_ms and now_ms() - changed_ms > _SETTLED_MS:
        changed_s = changed_ms // 1000
        headers["Last-Modified"] = formatdate(changed_s, usegmt=True)
    tags, since = request.if_none_match, request.if_modified_since
    if tags is not None:  # a date counts only without a tag (RFC 9110)
        is_known = any(each.value in (tag, "*") for each in tags)
    else:
        # A date in the future comes from a wrong clock. Later changes may have earlier dates.
        is_known = bool(changed_s and since and changed_s <= since.timestamp() <= time.time())
    if is_known:
        return web.Response(status=304, headers=headers)
    return web.Response(body=body, content_type="application/json", headers=headers)


def _without_folders(word: str) -> str:
    """A word without directories: ``-DCOMPILER=/usr/bin/cc`` becomes ``-DCOMPILER=cc``."""
    return " ".join(
        f"{name}{equals}{PurePath(value).name}" if "/" in value else part
        for part in word.split(" ")
        for name, equals, value in [part.rpartition("=")]
    )


def _key(entry: Mapping[str, Any]) -> str:
    """An entry's key in the order of a listing. It does not depend on other entries."""
    return f"{entry['created_ms']:016d}:{entry['id']}"


def _cursor(request: web.Request) -> str:
    """The key before the first entry of a page; empty for the first page. Raises
    ``InvalidRequest``."""
    text = request.query.get("cursor", "")
    try:
        key = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
    except ValueError:
        key = "?"
    if key and not (key[:16].isdigit() and key[16:17] == ":"):
        raise must("cursor", "be the next_cursor of a response")
    return key


def routes() -> list[web.RouteDef]:
    catalog = "/v2/catalog/{kind:models|engines}"
    return [
        web.get(catalog, listing),
        web.get(f"{catalog}/{{id}}", one),
        web.get(f"{catalog}/{{id}}/state", state),
        web.post(f"{catalog}/{{id}}/verify", verify),
    ]
