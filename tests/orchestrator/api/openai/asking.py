"""What tests of the OpenAI dialect ask, and how."""

from typing import Any

from tests.orchestrator.conftest import Service

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TEXT = {"model": "fake", "prompt": "hi", "max_tokens": 4}


async def answer_of(service: Service, path: str, body: dict[str, Any], status: int = 200) -> Any:
    return await service.ask("POST", path, status, json=body)
