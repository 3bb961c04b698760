"""What tests of several dialects ask, and how."""

import json
from typing import Any

from tests.orchestrator.conftest import Service

_HI = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "fake", "messages": _HI, "max_tokens": 4}
TEXT: dict[str, Any] = {"model": "fake", "prompt": "hi", "max_tokens": 4}
BODIES: dict[str, dict[str, Any]] = {
    "/v2/tasks": TEXT,
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
}
"""A small request for each of these paths."""


async def answer_of(service: Service, path: str, body: dict[str, Any], status: int = 200) -> Any:
    return await service.ask("POST", path, status, json=body)


async def chunks_of(service: Service, path: str, body: dict[str, Any]) -> list[Any]:
    """What a stream says until ``[DONE]``, each chunk on a line of its own."""
    events = (await service.ask("POST", path, json=body | {"stream": True})).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
