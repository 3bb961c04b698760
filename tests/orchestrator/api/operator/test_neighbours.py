"""What vLLM's clients and probes ask of a server."""

from typing import Any

from tests.orchestrator.conftest import MakeService, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker, Plan


async def get(service: Service, path: str, **headers: str) -> tuple[int, Any]:
    async with service.http.get(path, headers=headers) as response:
        is_json = response.content_type == "application/json"
        return response.status, await response.json() if is_json else await response.read()


async def test_probes_need_no_key_and_say_whether_work_may_come(
    make_service: MakeService, worker: FakeWorker
) -> None:
    service = await make_service(worker, token="t")
    assert await get(service, "/ping") == (200, b"")
    await service.ask("POST", "/ping")
    alone = await make_service(wait=False, token="t")
    assert (await get(alone, "/ping"))[0] == 503
    for path in ("/version", "/load", "/tokenizer_info"):
        status, answer = await get(service, path)
        assert (status, answer["error"]["code"]) == (401, "unauthenticated")


async def test_load_counts_what_waits_and_runs(service: Service, worker: FakeWorker) -> None:
    assert await get(service, "/load") == (200, {"server_load": 0})
    worker.plan = lambda submit: Plan(stall_at=0)
    await service.ask("POST", "/v2/tasks", 202, json={"prompt": "x"})
    assert await get(service, "/load") == (200, {"server_load": 1})


@for_each("path", ["/tokenizer_info", "/v1/tokenizer_info?model=fake"])
async def test_a_tokenizer_tells_what_chats_are_rendered_with(service: Service, path: str) -> None:
    status, info = await get(service, path)
    card = service.orchestrator.models.resolve("fake").card
    assert status == 200
    assert (info["model"], info["model_max_length"]) == ("fake", card.context_tokens)
    assert info["chat_template"] == card.chat_template
    assert {name: info[name] for name in card.special_tokens} == card.special_tokens
    status, answer = await get(service, "/tokenizer_info?model=none")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
