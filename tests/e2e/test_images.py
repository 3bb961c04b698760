"""Images from HTTP to tokens on the real Triton: a tiny random model that reads them, in vLLM.

vLLM imports no such model without torchvision, which its environment for CPUs lacks.
"""

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from catalog.paths import state_dir
from pool.engines.environments import environment_if_made, site_packages
from tests.e2e.conftest import Stack, stack_of
from tests.support.pictures import picture
from tests.support.stack import Triton
from tests.worker.engines.vllm.test_images import make_llava

pytest.importorskip("PIL")
pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    environment = environment_if_made("vllm", state_dir(), "cpu")
    folder = site_packages(Path(environment.get("VIRTUAL_ENV", "")))
    if not environment or not (folder / "torchvision").is_dir():
        pytest.skip("vLLM with torchvision is not installed here")
    path = make_llava(tmp_path_factory.mktemp("llava"))
    yield from stack_of(Triton(engine="vllm", model_path=path, environment=environment))


async def ask(http: aiohttp.ClientSession, *files: bytes) -> tuple[int, dict[str, Any]]:
    urls = ["data:image/png;base64," + base64.b64encode(file).decode() for file in files]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": one}} for one in urls]
    said = [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]
    asked = {"model": "demo", "messages": said, "max_tokens": 16, "temperature": 0}
    body = io.BytesIO(json.dumps(asked | {"ignore_eos": True, "logprobs": True}).encode())
    headers = {"Content-Type": "application/json"}
    async with http.post("/v1/chat/completions", data=body, headers=headers) as response:
        return response.status, await response.json()


def scores(answer: dict[str, Any]) -> list[float]:
    """What each token of an answer was worth."""
    return [round(one["logprob"], 3) for one in answer["choices"][0]["logprobs"]["content"]]


async def test_answers_follow_from_what_images_show(http: aiohttp.ClientSession) -> None:
    """The large one is sent to the worker in a message of two megabytes."""
    files = [picture(1), picture(2), picture(1), picture(3, 900, 700)]
    answers = await asyncio.gather(*(ask(http, file) for file in files), ask(http, *files[:2]))
    assert [status for status, _ in answers] == [200] * 5, answers
    worth = [scores(body) for _, body in answers]
    prompts = [body["usage"]["prompt_tokens"] for _, body in answers]
    assert worth[0] == pytest.approx(worth[2], abs=2e-3)
    assert len({each[0] for each in worth}) == 4
    # 16 tokens each, whatever its size, two around them
    assert prompts[4] - prompts[0] == 16 + 2 and prompts[3] == prompts[0]


async def test_what_is_no_image_costs_its_own_request_alone(http: aiohttp.ClientSession) -> None:
    torn = picture(1)[:600]  # its header is whole, so only the worker can see it
    (status, body), (other, _) = await asyncio.gather(ask(http, torn), ask(http, picture(1)))
    assert status == 400 and "image 1 cannot be decoded" in body["error"]["message"]
    assert other == 200
