"""``/v2/sessions``: create, show, list and delete conversations."""

import re

import msgspec
from aiohttp import web

from orchestrator.api.http.body import read_body
from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR
from orchestrator.api.http.fields import read_idle_keep_s, read_limit
from orchestrator.api.http.responses import json_response
from orchestrator.api.native.types import TaskMessage, given, prompt_of
from orchestrator.errors import InvalidRequest
from orchestrator.sessions.session import History, HistoryForm, Session
from orchestrator.sessions.store import SESSION_BYTES, SessionStore
from orchestrator.tasks.job import IDLE_KEEP_S, Message

PAGE, MAX = 20, 100
_NUMBER = re.compile(r"\d{1,15}", re.ASCII)
SESSIONS = web.AppKey("sessions", SessionStore)


class SessionRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /v2/sessions``. It has at most one form of the initial history."""

    model: str = ""
    prompt: str | None = None
    messages: list[TaskMessage] | None = None
    prompt_token_ids: list[int] | None = None
    idle_keep_s: float | None = None

    def history(self) -> History:
        found = given(self)
        if len(found) > 1:
            raise InvalidRequest(
                "expected at most one of prompt, messages and prompt_token_ids, got "
                + " and ".join(found),
                field=found[1],
            )
        return prompt_of(self) if found else ""


async def create(request: web.Request) -> web.Response:
    """Create a session: 201 with its id. Tasks use the id to continue it."""
    orchestrator, key = request.app[ORCHESTRATOR], request[CONTEXT].key.fingerprint
    store = request.app[SESSIONS]
    with orchestrator.limits.counted(key):
        model, history, idle_keep_s = await read_body(
            request, SessionRequest, lambda body: (body.model, body.history(), body.idle_keep_s)
        )
        keep_s = IDLE_KEEP_S if idle_keep_s is None else read_idle_keep_s(idle_keep_s)
        if model:
            orchestrator.questions.require_known(model)
        session = store.create(key, model, history, keep_s)
    return json_response(_described(session, store), status=201)


async def show(request: web.Request) -> web.Response:
    """Show a session with its whole history."""
    session, store = _session_of(request), request.app[SESSIONS]
    return json_response(_described(session, store) | _said(session))


async def listing(request: web.Request) -> web.Response:
    """List the key's own sessions in pages, oldest first."""
    store = request.app[SESSIONS]
    limit = read_limit(request.query, PAGE, MAX)
    found, is_more = store.page(request[CONTEXT].key.fingerprint, _after(request), limit)
    return json_response(
        {
            "sessions": [_described(session, store) for session in found],
            "next_after": found[-1].number if is_more else None,
        }
    )


async def delete(request: web.Request) -> web.Response:
    """Delete a session. A running turn is cancelled."""
    orchestrator, session = request.app[ORCHESTRATOR], _session_of(request)
    request.app[SESSIONS].forget(session, "deleted")
    if session.task is not None:
        orchestrator.cancel(session.task)
    return json_response({"session_id": session.id, "deleted": True})


def routes() -> list[web.RouteDef]:
    return [
        web.post("/v2/sessions", create),
        web.get("/v2/sessions", listing),
        web.get("/v2/sessions/{session_id}", show),
        web.delete("/v2/sessions/{session_id}", delete),
    ]


def _session_of(request: web.Request) -> Session:
    """The session in the request's path, for its own key or an admin key. Raises ``NotFound``."""
    key = request[CONTEXT].key
    store = request.app[SESSIONS]
    return store.get(request.match_info["session_id"], None if key.is_admin else key.fingerprint)


def _after(request: web.Request) -> int:
    value = request.query.get("after", "0")
    if not _NUMBER.fullmatch(value):
        raise InvalidRequest("after must be a whole number", field="after")
    return int(value)


def _described(session: Session, store: SessionStore) -> dict[str, object]:
    return {
        "session_id": session.id,
        "status": "running" if session.is_busy else "idle",
        "task_id": None if session.task is None else session.task.id,
        "model": session.model or None,
        "kind": session.kind and session.kind.value,
        "turns": session.turns,
        "bytes": session.bytes,
        "max_bytes": SESSION_BYTES,
        "idle_keep_s": session.idle_keep_s,
        "created_unix_ms": session.created_unix_ms,
        "expires_in_s": round(store.expires_in_s(session), 1),
        "number": session.number,
    }


def _said(session: Session) -> dict[str, object]:
    kind = session.kind
    if kind is HistoryForm.CHAT:
        messages = [one for one in session.history if isinstance(one, Message)]
        return {"messages": [_turn(one) for one in messages]}
    return {} if kind is None else {kind.value: session.history}


def _turn(message: Message) -> dict[str, object]:
    """A turn in responses. It has the number of its images instead of the images."""
    turn: dict[str, object] = {"role": message.role, "content": message.content}
    return turn | {"images": len(message.images)} if message.parts else turn
