"""What tests of the OpenAI dialect ask, and how."""

import json
from typing import Any

from tests.orchestrator.conftest import Service

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TEXT = {"model": "fake", "prompt": "hi", "max_tokens": 4}


async def answer_of(service: Service, path: str, body: dict[str, Any], status: int = 200) -> Any:
    return await service.ask("POST", path, status, json=body)


async def chunks_of(service: Service, path: str, body: dict[str, Any]) -> list[Any]:
    """What a stream says until ``[DONE]``, each chunk on a line of its own."""
    events = (await service.ask("POST", path, json=body | {"stream": True})).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
