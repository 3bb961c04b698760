"""LoRA adapters, each a model of its own name to clients and its base model to the queue."""

import pytest

from protocol import Adapter, Code, KvReport, adapter_salt, block_hashes
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.support.fake_worker import FakeWorker, Plan

TONE, LAW = Adapter("tone", "ab" * 32), Adapter("law", "cd" * 32)
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


@pytest.fixture
async def worker(make_worker: MakeWorker) -> FakeWorker:
    return await make_worker(adapters=(TONE, LAW))


async def answered(service: Service, model: str) -> tuple[int, str]:
    """Status and the model that the answer names; for an error, what it says."""
    path = "/v1/chat/completions"
    status, body = await service.answer("POST", path, json=CHAT | {"model": model})
    return status, body.get("model") or body["error"]["message"]


async def test_each_name_is_served_and_listed(service: Service, worker: FakeWorker) -> None:
    for name in ("tone", "fake", "law"):
        assert await answered(service, name) == (200, name)
    assert await answered(service, "") == (200, "fake"), "no adapter unless one is named"
    assert [submit.adapter for submit in worker.submits] == ["tone", "", "law", ""]
    listed = (await service.ask("GET", "/v1/models"))["data"]
    assert {one["id"]: (one["parent"], one["state"]) for one in listed} == {
        "fake": (None, "loaded"),
        "law": ("fake", "loaded"),
        "tone": ("fake", "loaded"),
    }
    told = (await service.ask("GET", "/metrics/vllm")).splitlines()
    (loras,) = [line for line in told if line.startswith("vllm:lora_requests_info{")]
    assert 'max_lora="2",running_lora_adapters="tone,law"' in loras
    assert not any('model_name="tone"' in line for line in told), "a picker reads one series"
    status, why = await answered(service, "poetry")
    assert status == 404 and "fake, law, tone" in why
    (instance,) = (await service.ask("GET", "/v2/instances"))["instances"]
    assert (instance["model"], instance["adapters"]) == ("fake", ["tone", "law"])


async def test_it_goes_only_where_these_very_weights_are(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    bare, other = await make_worker(), await make_worker(adapters=(Adapter("tone", "00" * 32),))
    able = await make_worker(adapters=(LAW,))
    service = await make_service(bare, other, able)
    for _ in range(4):
        assert (await answered(service, "law"))[0] == 200
    assert (len(bare.submits), len(other.submits), len(able.submits)) == (0, 0, 4)
    able.plan = lambda submit: Plan(refuse=(Code.DRAINING, "elsewhere"))
    task = {"model": "law", "prompt": "x", "max_tokens": 1, "deadline_ms": 300}
    status, _ = await service.answer("POST", "/v1/completions", json=task)
    assert status >= 500, "its base model alone would be another model"
    assert not bare.submits and not other.submits


async def test_a_base_models_kv_is_not_its_adapters(service: Service, worker: FakeWorker) -> None:
    base, tone = (service.orchestrator.models.resolve(name) for name in ("fake", "tone"))
    ids = tone.encode("a prompt of more than two blocks of sixteen bytes")
    own = block_hashes(ids, 16, adapter_salt(b"", TONE.digest))
    assert (base.prefix_hashes(ids, ""), tone.prefix_hashes(ids, "")) == (
        block_hashes(ids, 16, b""),
        own,
    )
    assert own != service.orchestrator.models.resolve("law").prefix_hashes(ids, "")
    service.orchestrator.registry.prefixes.apply(worker.address, KvReport(own, []))
    prompt = "a prompt of more than two blocks of sixteen bytes"
    for model, is_known in (("fake", False), ("tone", True)):
        task = {"model": model, "prompt": prompt, "max_tokens": 1}
        await service.ask("POST", "/v1/completions", json=task)
        assert service.metric("tidegate_placements_by_prefix_total") == is_known
