"""The body of a submission to ``/v2/tasks``."""

from collections.abc import Mapping

import msgspec

from orchestrator.api.http.fields import GenerationRequest
from orchestrator.errors import InvalidRequest
from orchestrator.tasks.job import Message, OnDisconnect, Prompt


class TaskMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One turn of a chat. A body may have so many that the collector would be the dearest part."""

    role: str
    content: str


class TaskRequest(GenerationRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Exactly one of ``prompt``, ``messages``, ``prompt_token_ids``."""

    prompt: str | None = None
    messages: list[TaskMessage] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: int | None = None
    on_disconnect: OnDisconnect = OnDisconnect.CONTINUE

    def prompt_of(self) -> Prompt:
        given = [name for name in _PROMPTS if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequest(
                "expected exactly one of prompt, messages and prompt_token_ids, got "
                + (" and ".join(given) or "none"),
                field=given[1] if given else "prompt",
            )
        if self.prompt is not None:
            return self.prompt
        if self.messages is not None:
            if not self.messages:
                raise InvalidRequest("messages is empty; it needs at least one", field="messages")
            return tuple(Message(m.role, m.content) for m in self.messages)
        return tuple(self.prompt_token_ids or ())

    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def field_names(self) -> Mapping[str, str]:
        given = (name for name in _PROMPTS if getattr(self, name) is not None)
        return {"prompt": next(given, "prompt")}


_PROMPTS = ("prompt", "messages", "prompt_token_ids")
