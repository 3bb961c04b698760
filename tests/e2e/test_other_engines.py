"""Other people's engines on the real Triton: texts, cancels and deadlines as with our own.

One that is not installed, here or in an environment of its own, is skipped by name.
"""

import asyncio
import json
from collections.abc import Iterator

import aiohttp
import pytest

from catalog.paths import state_dir
from pool.engines.environments import environment_if_made
from tests.e2e.conftest import Stack, stack_of
from tests.support.engines import ENGINES, EngineCase
from tests.support.stack import Triton

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

OTHERS = [case for case in ENGINES if case.name != "torch"]
STORY = {"model": "demo", "prompt": "Once upon a time", "temperature": 0}


@pytest.fixture(scope="module", params=OTHERS, ids=str)
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    case: EngineCase = request.param
    environment = environment_if_made(case.name, state_dir(), "cpu")
    if case.missing and not environment:
        pytest.skip(case.missing)
    settings = {
        name: json.dumps(value) if isinstance(value, dict) else value
        for name, value in case.settings.items()
    }
    yield from stack_of(Triton(engine=case.name, environment=environment, **settings))


async def test_texts_are_streamed_whole_and_alike(http: aiohttp.ClientSession) -> None:
    async def text(stream: bool) -> str:
        asked = STORY | {"max_tokens": 32, "stream": stream}
        async with http.post("/v1/completions", json=asked) as response:
            assert response.status == 200, await response.text()
            if not stream:
                body = await response.json()
                assert body["usage"]["completion_tokens"] == 32
                return str(body["choices"][0]["text"])
            lines = (await response.text()).splitlines()
            events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
            assert events[-1] == "[DONE]"
            return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])

    first = await text(False)
    assert len(first) > 20
    assert set(await asyncio.gather(*(text(i % 2 == 0) for i in range(8)))) == {first}
