"""Time to first token through the orchestrator and with a bare ``tritonclient``, in turns.

Both send the same prompt to the same model in the same run, and stop the clock at the first event
with text. The bare client opens a stream per request, and the orchestrator's client reuses its
connection, as such clients usually do. The order alternates, so that neither is always second.
"""

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import tritonclient.grpc.aio as triton

from perf.load.connection import FIRST_TEXT, HOST, HttpConnection
from perf.load.drive import PATH
from perf.report.bundle import Figure
from perf.stack.context import Bench, BenchContext
from perf.stack.stack import Stack, StackSpec
from protocol.tensors import MODEL_NAME, SAMPLING_PARAMETERS, STREAM, TEXT_INPUT, TEXT_OUTPUT

_PROMPT = "Once upon a time there was a small lighthouse at the edge of the sea, and in it"
_SAMPLING = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
_WARM_UP = 10


async def run(context: BenchContext) -> list[Figure]:
    stack = await context.stack(StackSpec("torch", device=context.device))
    assert context.card is not None
    through, bare = await _pairs(stack, context.card.model, 60 if context.quick else 300)
    added = [a - b for a, b in zip(through, bare, strict=True)]
    ratios = [a / b for a, b in zip(through, bare, strict=True)]
    of = Figure.of
    return [
        of("ttft.orchestrator_ms", "through the orchestrator, p50", "ms", through, spread="p5–p95"),
        of("ttft.bare_ms", "bare tritonclient, p50", "ms", bare, spread="p5–p95"),
        of("ttft.added_ms", "added (paired), p50", "ms", added, spread="p5–p95"),
        Figure.tail_of("ttft.orchestrator_p99_ms", "through it, p99", "ms", through, 99),
        Figure.tail_of("ttft.bare_p99_ms", "bare tritonclient, p99", "ms", bare, 99),
        Figure.tail_of("ttft.added_p99_ms", "added (paired), p99", "ms", added, 99),
        of(
            "ttft.ratio",
            "through it ÷ bare",
            "",
            ratios,
            spread="p25–p75",
            tolerance=1.5,
        ),
    ]


async def _pairs(stack: Stack, model: str, pairs: int) -> tuple[list[float], list[float]]:
    """Milliseconds to the first token, through the orchestrator and bare."""
    through, bare = [], []
    body = {"model": model, "prompt": _PROMPT, "stream": True, **_SAMPLING}
    async with (
        HttpConnection(HOST, stack.port) as http,
        triton.InferenceServerClient(stack.grpc_address) as client,
    ):
        for turn in range(_WARM_UP + pairs):
            if turn % 2:
                second = await _bare(client)
                first = await first_token_ms(http, body)
            else:
                first = await first_token_ms(http, body)
                second = await _bare(client)
            if turn >= _WARM_UP:
                through.append(first)
                bare.append(second)
    return through, bare


async def first_token_ms(http: HttpConnection, body: dict[str, object]) -> float:
    """Milliseconds from a request to its first token; the answer is read to its end."""
    begun = time.perf_counter()
    http.send("POST", PATH, body)
    await http.until(FIRST_TEXT)
    elapsed = time.perf_counter() - begun
    await http.finish()
    return elapsed * 1000


async def _bare(client: triton.InferenceServerClient) -> float:
    elapsed = None
    begun = time.perf_counter()
    async for result, error in client.stream_infer(_request()):
        if error is not None:
            raise error
        if elapsed is None and result.as_numpy(TEXT_OUTPUT)[0]:
            elapsed = time.perf_counter() - begun
    if elapsed is None:
        raise RuntimeError("the plain contract answered without text")
    return elapsed * 1000


async def _request() -> AsyncIterator[dict[str, Any]]:
    text = triton.InferInput(TEXT_INPUT, [1], "BYTES")
    text.set_data_from_numpy(np.array([_PROMPT.encode()], dtype=np.object_))
    stream = triton.InferInput(STREAM, [1], "BOOL")
    stream.set_data_from_numpy(np.array([True]))
    sampling = triton.InferInput(SAMPLING_PARAMETERS, [1], "BYTES")
    sampling.set_data_from_numpy(np.array([json.dumps(_SAMPLING).encode()], dtype=np.object_))
    yield {"model_name": MODEL_NAME, "inputs": [text, stream, sampling]}


BENCH = Bench(
    "ttft",
    "time to first token of the demo model, one request at a time",
    run,
    limit_s=90,
)
