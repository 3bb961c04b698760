"""All sessions, by key. Their number, bytes and age are bounded.

The history is stored here and not on the instance that computed it. If an instance is lost, another
one computes the next turn from the start. A turn becomes part of the history when it ends without
error. A turn that failed, was cancelled or missed its deadline is not kept and may be sent again.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

import msgspec

from orchestrator.clock import Clock
from orchestrator.errors import InvalidRequest, NoCapacity, NotFound, RateLimited, SessionBusy
from orchestrator.fair_share import is_over_share
from orchestrator.ids import Ids
from orchestrator.retention import ItemCall, ignore
from orchestrator.sessions.session import (
    History,
    HistoryForm,
    Session,
    SessionCopy,
    bytes_of,
    copier_of,
    kind_of,
    with_answer,
)
from orchestrator.tasks.job import Job, Prompt
from orchestrator.tasks.task import Task

MAX_PER_KEY: Final = 1000
"""Most sessions that one key may have."""
SESSION_TTL_S: Final = 3600.0
"""Seconds that a session is kept without a turn."""
SESSION_BYTES: Final = 2**20
"""Most bytes of one session's text."""
ALL_SESSIONS_BYTES: Final = 256 * 2**20
"""Most bytes of the text of all sessions together."""
PREFIX = "sess_"
"""Prefix of ids that are made here. Other conversation ids only locate a conversation's KV."""


def is_session(session_id: str) -> bool:
    """Whether a task with this id continues a session. Other ids only name a conversation."""
    return session_id.startswith(PREFIX)


@dataclass(slots=True, eq=False)
class Turn:
    """A turn of a session: its job, and its prompt after the history."""

    job: Job
    prompt: History
    _store: "SessionStore"
    _session: Session

    @property
    def is_deleted(self) -> bool:
        return self._session not in self._store

    def follow(self, task: Task) -> None:
        """Follow the submitted ``task`` to add its answer to the history."""
        self._session.task = task
        task.on_end.append(self._ended)
        if task.ending is not None:
            self._ended(task)

    def _ended(self, task: Task) -> None:
        ending = task.ending
        assert ending is not None
        is_kept = ending.error is None
        if is_kept:
            self._store.said(self._session, with_answer(self.prompt, task, ending.tail))
        self._store.turns["kept" if is_kept else "dropped"] += 1
        self.prompt = ""  # free it: the kept task refers to this turn
        self._store.release(self._session)


class SessionStore:
    """Sessions by id. An id is only valid with its key."""

    def __init__(self, clock: Clock, ids: Ids) -> None:
        self.total_bytes = 0
        self.turns: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.keep_s = SESSION_TTL_S
        self.on_change: ItemCall = ignore
        """Called with the key and id of a session that was created, changed or removed."""
        self.on_use: ItemCall = ignore
        """Called with the key and id of a session that was used."""
        self._clock = clock
        self._ids = ids
        self._numbers: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        """Sessions by id, least recently used first."""
        self._by_key: defaultdict[str, dict[int, Session]] = defaultdict(dict)
        """Sessions of each key, by number in ascending order."""

    def __len__(self) -> int:
        self.prune()
        return len(self._sessions)

    def __contains__(self, session: Session) -> bool:
        return session.id in self._sessions

    def create(self, key: str, model: str, history: History, idle_keep_s: float) -> Session:
        """Create a session. Raises ``RateLimited``, ``InvalidRequest`` or ``NoCapacity``."""
        self.prune()
        if len(self._by_key.get(key, ())) >= MAX_PER_KEY:
            raise RateLimited(
                f"this key has {MAX_PER_KEY} sessions, which is the most; delete "
                "some (DELETE /v2/sessions/…): unused sessions are removed after "
                f"{SESSION_TTL_S:g} s",
                retryable=False,
            )
        session = Session(f"{PREFIX}{self._ids.new()}", key, model, idle_keep_s)
        session.created_unix_ms = int(1000 * self._clock.unix())
        self._add(session, history)
        self.on_change(key, session.id)
        return session

    def _add(self, session: Session, history: History) -> None:
        key, size = session.key, bytes_of(history)
        self._require_room(key, size, size)
        self._numbers[key] += 1
        session.number, session.used_at = self._numbers[key], self._clock.now()
        self._sessions[session.id] = self._by_key[key][session.number] = session
        self._set_history(session, history)

    def get(self, session_id: str, key: str | None) -> Session:
        """A session of ``key`` (None: any key). Raises ``NotFound``."""
        self.prune()
        session = self._sessions.get(session_id)
        if session is None or (key is not None and session.key != key):
            error = NotFound(
                f"there is no session {session_id[:64]!r}; sessions without a turn for "
                f"{SESSION_TTL_S:g} s are removed",
                field="session_id",
            )
            error.item_id = session_id
            raise error
        return session

    def page(self, key: str, after: int, most: int) -> tuple[list[Session], bool]:
        """A key's sessions with numbers above ``after``, and whether there are more."""
        self.prune()
        own = self._by_key.get(key, {})
        found = list(islice((one for one in own.values() if one.number > after), most + 1))
        return found[:most], len(found) > most

    def expires_in_s(self, session: Session) -> float:
        """Seconds until the session is removed if it has no turn."""
        return max(0.0, session.used_at + SESSION_TTL_S - self._clock.now())

    @contextmanager
    def turn(self, job: Job, prompt: Prompt) -> Iterator[Turn]:
        """Begin the next turn of a job's session. The caller must ``follow`` the task. Raises
        ``NotFound``, ``SessionBusy``, ``InvalidRequest`` or ``NoCapacity``."""
        session = self.get(job.session_id, job.key)
        if session.is_busy:
            running = f" (task {session.task.id})" if session.task is not None else ""
            raise SessionBusy(
                f"this session already has a running turn{running}; wait for its end or cancel it"
            )
        joined = session.joined(prompt)
        size = bytes_of(joined)
        self._require_room(job.key, size, size - session.bytes)
        keeps = job.idle_keep_s if job.states_idle_keep else session.idle_keep_s
        job = replace(
            job,
            model=job.model or session.model,
            idle_keep_s=keeps,
            needs_ids=kind_of(joined) is HistoryForm.TOKENS,
        )
        session.is_busy = True
        turn = Turn(job, joined, self, session)
        try:
            yield turn
        except BaseException:
            self.release(session)
            raise

    def said(self, session: Session, history: History) -> None:
        if session in self:  # otherwise the session was deleted
            self._set_history(session, history)
            session.turns += 1
            self.on_change(session.key, session.id)

    def release(self, session: Session) -> None:
        session.is_busy = False
        session.task = None
        if session in self:
            self._touch(session)

    def prune(self) -> None:
        oldest_kept = self._clock.now() - SESSION_TTL_S
        while self._sessions:
            session = next(iter(self._sessions.values()))
            if session.used_at > oldest_kept:
                return
            if session.is_busy:
                self._touch(session)
            else:
                self.forget(session, "expired")

    def _require_room(self, key: str, size: int, more: int) -> None:
        if size > SESSION_BYTES:
            raise InvalidRequest(
                f"with this turn the session would have {size} bytes, more than the limit of "
                f"{SESSION_BYTES}; continue in a new session with only the necessary part of"
                " this one",
                field="session_id",
            )
        own, left = self._bytes[key], ALL_SESSIONS_BYTES - self.total_bytes
        is_over = is_over_share(own, more, left)
        if more > 0 and (more > left or is_over):
            whose, held = ("of this key", own) if is_over else ("together", self.total_bytes)
            raise NoCapacity(
                f"all sessions {whose} take {held} of {ALL_SESSIONS_BYTES} bytes; delete some, try "
                "again later, or send the whole conversation without a session"
            )

    def _set_history(self, session: Session, history: History) -> None:
        size = bytes_of(history)
        self._count(session.key, size - session.bytes)
        session.history, session.bytes = history, size

    def _count(self, key: str, more: int) -> None:
        self.total_bytes += more
        self._bytes[key] += more
        if not self._bytes[key]:
            del self._bytes[key]

    def _touch(self, session: Session) -> None:
        session.used_at = self._clock.now()
        self._sessions.move_to_end(session.id)
        self.on_use(session.key, session.id)

    def copier(self, key: str, name: str) -> Callable[[], bytes] | None:
        """See ``Shelf``."""
        session = self._sessions.get(name)
        return None if session is None else copier_of(session)

    def adopt(self, key: str, name: str, copy: bytes) -> None:
        """See ``Shelf``. Raises ``NoCapacity`` or ``InvalidRequest`` if it is too large."""
        found = msgspec.msgpack.decode(copy, type=SessionCopy)
        self.let_go(key, name)
        session = Session(name, key, found.model, found.idle_keep_s)
        session.turns, session.created_unix_ms = found.turns, found.created_unix_ms
        self._add(session, found.history)

    def let_go(self, key: str, name: str) -> None:
        """See ``Shelf``. A running turn is not kept."""
        session = self._sessions.get(name)
        if session is not None:
            self._remove(session)

    def names(self) -> Iterator[tuple[str, str]]:
        return ((session.key, name) for name, session in self._sessions.items())

    def forget(self, session: Session, why: str) -> None:
        """Remove a session with its history. The caller must end a running turn."""
        self._remove(session)
        self.ended[why] += 1
        self.on_change(session.key, session.id)

    def _remove(self, session: Session) -> None:
        del self._sessions[session.id]
        own = self._by_key[session.key]
        del own[session.number]
        if not own:
            del self._by_key[session.key]
        self._count(session.key, -session.bytes)
