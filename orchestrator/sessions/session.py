"""One conversation. Its text so far is the start of the next turn's prompt."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from sys import getsizeof

import msgspec

from orchestrator.errors import InvalidRequest
from orchestrator.tasks.image import kept_bytes
from orchestrator.tasks.job import Chat, Message, Prompt, Written
from orchestrator.tasks.task import Task

SESSION_BYTES = 1024
MESSAGE_BYTES = 80
TOKEN_BYTES = 40
"""Overhead in bytes: of a session, a message and a token, in addition to the text."""


class HistoryForm(StrEnum):
    """Form of a session's history. The first turn determines it."""

    CHAT = "messages"
    TEXT = "prompt"
    TOKENS = "prompt_token_ids"


History = Written


@dataclass(slots=True, eq=False)
class Session:
    """A conversation of one key. Only the store changes it."""

    id: str
    key: str
    """Fingerprint."""
    model: str
    """Model of turns that do not name one."""
    idle_keep_s: float
    number: int = 0
    """Number of the session among the key's sessions, in order."""
    history: History = ""
    bytes: int = 0
    turns: int = 0
    """Number of turns that ended without error and so are in the history."""
    is_busy: bool = False
    """Whether a turn is being submitted or is running."""
    task: Task | None = None
    used_at: float = 0.0
    created_unix_ms: int = 0

    @property
    def kind(self) -> HistoryForm | None:
        return kind_of(self.history) if self.history else None

    def joined(self, prompt: Prompt) -> History:
        """The history followed by ``prompt``. Raises ``InvalidRequest`` if their forms differ."""
        if isinstance(prompt, Chat):
            prompt = prompt.messages
        if not self.history:
            return prompt
        kind, new = kind_of(self.history), kind_of(prompt)
        if kind is not new:
            raise InvalidRequest(
                f"this session began with {kind.value} and cannot continue with {new.value}; "
                "create another session for those",
                field=new.value,
            )
        return self.history + prompt  # type: ignore[operator]  # of one kind, as was checked


class SessionCopy(msgspec.Struct, frozen=True, array_like=True):
    """A copy of a session for another orchestrator. One of the three histories is set."""

    model: str
    idle_keep_s: float
    turns: int
    created_unix_ms: int
    text: str = ""
    ids: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()

    @property
    def history(self) -> History:
        return self.text or self.ids or self.messages or ""


_COPIED_AS = {HistoryForm.TEXT: "text", HistoryForm.TOKENS: "ids", HistoryForm.CHAT: "messages"}


def copier_of(session: Session) -> Callable[[], bytes]:
    """A function that makes a copy of the session's current state, on any thread."""
    facts = (session.model, session.idle_keep_s, session.turns, session.created_unix_ms)
    history = {_COPIED_AS[kind_of(session.history)]: session.history}
    return partial(msgspec.msgpack.encode, SessionCopy(*facts, **history))  # type: ignore[arg-type]


def kind_of(prompt: History) -> HistoryForm:
    """Form of a prompt. An empty tuple is a prompt without tokens."""
    if isinstance(prompt, str):
        return HistoryForm.TEXT
    return HistoryForm.CHAT if prompt and isinstance(prompt[0], Message) else HistoryForm.TOKENS


def with_answer(history: History, task: Task, tail: str) -> History:
    """``history`` with the answer of ``task``. ``tail`` is the end of the answer's text."""
    answer = task.record()
    match kind_of(history):
        case HistoryForm.TOKENS:
            return (*history, *answer.ids)
        case HistoryForm.TEXT:
            return f"{history}{answer.text()}{tail}"
        case HistoryForm.CHAT:
            said = Message("assistant", answer.text() + tail)
            return (*history, said)


def bytes_of(history: History) -> int:
    if isinstance(history, str):
        return SESSION_BYTES + getsizeof(history)
    if kind_of(history) is HistoryForm.TOKENS:
        return SESSION_BYTES + TOKEN_BYTES * len(history)
    messages = (message for message in history if isinstance(message, Message))
    return SESSION_BYTES + sum(
        MESSAGE_BYTES + getsizeof(one.content) + kept_bytes(one.parts) for one in messages
    )
