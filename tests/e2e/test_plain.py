"""The plain contract on the real Triton: tritonclient, Triton's own HTTP, and the same tokens."""

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import pytest
import tritonclient.grpc.aio as triton_grpc

from tests.e2e.conftest import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards")]


def tensor(name: str, value: str | bool) -> Any:
    kind, array = (
        ("BOOL", np.array([value]))
        if isinstance(value, bool)
        else ("BYTES", np.array([value.encode()], dtype=np.object_))
    )
    given = triton_grpc.InferInput(name, [1], kind)
    given.set_data_from_numpy(array)
    return given


async def stream(
    address: str,
    parameters: dict[str, Any] | None = None,
    client_timeout: float | None = None,
    **inputs: str | bool,
) -> AsyncIterator[Any]:
    """Responses of one request; raises what Triton answers in-band."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        given = {"text_input": "Once upon a time", "stream": True} | inputs
        yield {
            "model_name": "llm",
            "inputs": [tensor(name, value) for name, value in given.items()],
            "parameters": parameters,
        }

    async with triton_grpc.InferenceServerClient(address) as client:
        responses = client.stream_infer(
            requests(), stream_timeout=client_timeout, headers={"triton_grpc_error": "false"}
        )
        async for result, error in responses:
            if error is not None:
                raise error
            yield result


async def test_triton_answers_the_plain_contract_over_http(demo: Stack) -> None:
    """WK-1: a stream's pieces are the whole answer, and Triton says that it is ready."""
    sampling = json.dumps({"temperature": 0, "max_tokens": 12, "logprobs": 2})
    flags = ("return_finish_reason", "return_num_output_tokens", "return_logprobs")
    asked = {"text_input": "Once upon a time", "sampling_parameters": sampling}
    asked |= dict.fromkeys(flags, True)
    async with aiohttp.ClientSession(demo.triton.http) as http:
        async with http.post("/v2/models/llm/generate", json=asked) as response:
            assert response.status == 200, await response.text()
            whole = await response.json()
        streamed = asked | {"stream": True}
        async with http.post("/v2/models/llm/generate_stream", json=streamed) as response:
            lines = [line async for line in response.content if line.startswith(b"data: ")]
        for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/llm/ready"):
            async with http.get(path) as response:
                assert response.status == 200
    pieces = [json.loads(line[6:]) for line in lines]
    assert whole["text_output"].endswith("".join(piece["text_output"] for piece in pieces))
    assert sum(piece["num_output_tokens"] for piece in pieces) == whole["num_output_tokens"] == 12
    assert pieces[-1]["finish_reason"] == whole["finish_reason"] == "length"
    assert len(json.loads(whole["logprobs"])) == 12


async def test_a_plain_client_that_goes_away_stops_its_generation(paced: Stack) -> None:
    endless = json.dumps({"max_tokens": 1500, "ignore_eos": True})
    responses = stream(paced.triton.grpc, sampling_parameters=endless)
    async for _ in responses:
        break
    await responses.aclose()  # type: ignore[attr-defined]
