"""One conversation: the text so far, which begins the next turn's prompt."""

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
"""Bytes that a session takes on top of its text, a message on top of its own, a token."""


class HistoryForm(StrEnum):
    """Form of a session's history; its first turn decides."""

    CHAT = "messages"
    TEXT = "prompt"
    TOKENS = "prompt_token_ids"


History = Written


@dataclass(slots=True, eq=False)
class Session:
    """A conversation of one key. Changed by the store alone."""

    id: str
    number: int
    """Counts the key's sessions, in order."""
    key: str
    """Fingerprint."""
    model: str
    """Model of turns that name none."""
    idle_keep_s: float
    history: History = ""
    bytes: int = 0
    turns: int = 0
    """Number of turns that ended well, and so are part of the history."""
    is_busy: bool = False
    """Whether a turn is being submitted, or runs."""
    task: Task | None = None
    """The task of the turn that runs, if any."""
    used_at: float = 0.0
    created_unix_ms: int = 0

    @property
    def kind(self) -> HistoryForm | None:
        return kind_of(self.history) if self.history else None

    def joined(self, prompt: Prompt) -> History:
        """The history and ``prompt``. Raises ``InvalidRequest`` where their forms differ."""
        if isinstance(prompt, Chat):
            prompt = prompt.messages
        if not self.history:
            return prompt
        kind, new = kind_of(self.history), kind_of(prompt)
        if kind is not new:
            raise InvalidRequest(
                f"this session continues with {kind.value}, which it began with, not with "
                f"{new.value}; create another session for those",
                field=new.value,
            )
        return self.history + prompt  # type: ignore[operator]  # of one kind, as was checked


class SessionCopy(msgspec.Struct, frozen=True, array_like=True):
    """A session as another orchestrator gets it. One of the three histories is filled in."""

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


def copier_of(session: Session) -> Callable[[], bytes]:
    """Makes a copy of a session as it is now, on any thread."""
    facts = (session.model, session.idle_keep_s, session.turns, session.created_unix_ms)
    match session.history:
        case str() as text:
            copy = SessionCopy(*facts, text=text)
        case history if session.kind is HistoryForm.TOKENS:
            copy = SessionCopy(*facts, ids=history)  # type: ignore[arg-type]
        case history:
            copy = SessionCopy(*facts, messages=history)  # type: ignore[arg-type]
    return partial(msgspec.msgpack.encode, copy)


def kind_of(prompt: History) -> HistoryForm:
    """Form of a prompt; an empty tuple is a prompt of no tokens."""
    if isinstance(prompt, str):
        return HistoryForm.TEXT
    return HistoryForm.CHAT if prompt and isinstance(prompt[0], Message) else HistoryForm.TOKENS


def with_answer(history: History, task: Task, tail: str) -> History:
    """``history`` with the answer of ``task``; ``tail`` is the end of its text."""
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
