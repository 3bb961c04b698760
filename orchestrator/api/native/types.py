"""The body of a submission to ``/v2/tasks``."""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from orchestrator.api.http.field_errors import wrong
from orchestrator.api.http.grammars import GrammarRequest
from orchestrator.api.http.images import image_of_url
from orchestrator.errors import InvalidRequest
from orchestrator.tasks.job import Message, OnDisconnect, Prompt, Written, said_by


class TaskMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One turn. A body may have so many turns that garbage collection would dominate."""

    role: str
    content: str
    images: list[str] = []
    """Images before the text, each as a ``data:`` URL."""


class TaskRequest(GrammarRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A submission with exactly one of ``prompt``, ``messages`` and ``prompt_token_ids``."""

    prompt: str | None = None
    messages: list[TaskMessage] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: int | None = None
    on_disconnect: OnDisconnect = OnDisconnect.CONTINUE
    durable: bool = False
    idempotent: bool = False

    def prompt_of(self) -> Prompt:
        found = given(self)
        if len(found) != 1:
            raise InvalidRequest(
                "expected exactly one of prompt, messages and prompt_token_ids, got "
                + (" and ".join(found) or "none"),
                field=found[1] if found else "prompt",
            )
        return prompt_of(self)

    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def is_awaited(self) -> bool:
        return False

    def field_names(self) -> Mapping[str, str]:
        return {"prompt": next(iter(given(self)), "prompt")}


class HasPrompt(Protocol):
    @property
    def prompt(self) -> str | None: ...
    @property
    def messages(self) -> list[TaskMessage] | None: ...
    @property
    def prompt_token_ids(self) -> list[int] | None: ...


def given(body: HasPrompt) -> list[str]:
    return [name for name in _PROMPTS if getattr(body, name) is not None]


def prompt_of(body: HasPrompt) -> Written:
    """The prompt in any of its forms. Raises ``InvalidRequest`` if ``messages`` is empty."""
    if body.prompt is not None:
        return body.prompt
    if body.messages is not None:
        if not body.messages:
            raise InvalidRequest("messages is empty; send at least one message", field="messages")
        return tuple(_turn(message, at) for at, message in enumerate(body.messages))
    return tuple(body.prompt_token_ids or ())


def _turn(message: TaskMessage, at: int) -> Message:
    if not message.images:
        return Message(message.role, message.content)
    where = f"messages[{at}].images"
    if message.role != "user":
        raise wrong(where, "images must be in a user message")
    images = [image_of_url(url, f"{where}[{n}]") for n, url in enumerate(message.images)]
    return said_by(message.role, [*images, message.content])


_PROMPTS = ("prompt", "messages", "prompt_token_ids")
