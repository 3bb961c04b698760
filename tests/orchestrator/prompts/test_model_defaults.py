"""What a model card says for requests that do not, and about a context that is cut short."""

import pytest

from protocol import Sampling, SamplingDefaults
from tests.orchestrator.conftest import MakeService, MakeWorker

DEFAULTS = SamplingDefaults(
    temperature=0.7, top_p=0.8, top_k=20, min_p=0.01, repetition_penalty=1.05, max_tokens=9
)
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
BODIES: dict[str, dict[str, object]] = {
    "/v2/tasks": {"prompt": "hi"},
    "/v1/completions": {"model": "fake", "prompt": "hi"},
    "/v1/chat/completions": {"model": "fake", "messages": [{"role": "user", "content": "hi"}]},
}


def said_by(sampling: Sampling) -> dict[str, float]:
    return {name: getattr(sampling, name) for name in NEUTRAL}


@pytest.mark.parametrize("path", BODIES)
async def test_what_a_request_does_not_state_is_the_model_s(
    make_worker: MakeWorker, make_service: MakeService, path: str
) -> None:
    """vLLM's default; an explicit value always wins, a neutral one too."""
    worker = await make_worker(sampling_defaults=DEFAULTS)
    service = await make_service(worker)

    async def asked(**stated: object) -> Sampling:
        before = len(worker.submits)
        await service.ask("POST", path, 200, 202, json=BODIES[path] | stated)
        await worker.until(lambda: len(worker.submits) > before)
        return worker.submits[-1].sampling

    unasked = await asked()
    ours = {name: getattr(DEFAULTS, name) for name in NEUTRAL}
    assert said_by(unasked) == ours
    assert unasked.max_tokens == 9
    stated = await asked(**NEUTRAL, max_tokens=12)
    assert said_by(stated) == NEUTRAL
    assert stated.max_tokens == 12
    assert said_by(await asked(temperature=0)) == ours | {"temperature": 0.0}
    assert said_by(await asked(temperature=None)) == ours


@pytest.mark.parametrize("full", [512, 8192])
async def test_a_context_that_the_kv_pool_cuts_short_says_what_to_set(
    make_worker: MakeWorker, make_service: MakeService, full: int
) -> None:
    service = await make_service(await make_worker(full_context_tokens=full))
    for body in ({"prompt": "x" * 60_000}, {"prompt": "x", "max_tokens": 600}):
        error = await service.refused(400, "/v2/tasks", json=body)
        assert error["code"] == "context_overflow"
        cut = "own context is 8192, but the worker's KV pool holds 512 tokens" in error["message"]
        assert cut == ("TIDEGATE_WORKER__KV__BLOCKS" in error["message"]) == (full == 8192)
