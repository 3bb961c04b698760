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
    asked = {"text_input": b"Once upon a time", "sampling_parameters": endless.encode()}
    inputs = [triton_grpc.InferInput(name, [1], "BYTES") for name in asked]
    for given, value in zip(inputs, asked.values(), strict=True):
        given.set_data_from_numpy(np.array([value], dtype=np.object_))
    streamed = triton_grpc.InferInput("stream", [1], "BOOL")
    streamed.set_data_from_numpy(np.array([True]))

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "llm", "inputs": [*inputs, streamed]}

    async with triton_grpc.InferenceServerClient(paced.triton.grpc) as client:
        _, error = await anext(client.stream_infer(requests()))
        assert error is None
