"""Attacks on Triton's own ports: lane messages and the plain contract."""

import asyncio
import json
import random
import struct
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import aiohttp
import grpc
import msgspec
from tritonclient.grpc import service_pb2, service_pb2_grpc

from orchestrator.lanes.wire import to_frame, to_request
from perf.attack import mutations
from perf.attack.target import SECRET, Attack, Budget, Tally, Target, several
from protocol import (
    PROTOCOL_VERSION,
    Cancel,
    Describe,
    Drain,
    LaneMessage,
    Open,
    Pause,
    Resume,
    Sampling,
    Submit,
)
from protocol.tensors import MODEL_NAME

_LOOK_S = 0.3


async def lanes(target: Target, rng: random.Random, tally: Tally, budget: Budget) -> None:
    """Lane messages from somebody who does not know the secret, whole and bent."""
    async with grpc.aio.insecure_channel(target.triton_grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        async def one() -> None:
            messages = [_message(rng) for _ in range(rng.randint(1, 4))]
            outcome = "nothing"
            call = stub.ModelStreamInfer(_stream(rng, messages))
            with suppress(TimeoutError):
                try:
                    async with asyncio.timeout(_LOOK_S):
                        async for response in call:
                            outcome = _outcome(response, tally)
                except grpc.RpcError as error:
                    code = error.code() if isinstance(error, grpc.aio.AioRpcError) else "?"
                    outcome = f"gRPC {code}"
                except (msgspec.DecodeError, ValueError) as error:
                    outcome = "no frame"
                    tally.fault(f"an answer that is not a frame: {error}")
            call.cancel()
            tally.add(outcome)

        await several(budget, one)


def _outcome(response: Any, tally: Tally) -> str:
    if response.error_message:
        if "Traceback" in response.error_message or SECRET in response.error_message:
            tally.fault(f"an error that says too much: {response.error_message[:300]}")
        return "refused by Triton" if "lane" not in response.error_message else "refused"
    frame = to_frame(response.infer_response)
    if frame is None:
        return "nothing"
    if frame.error is not None:
        return f"lane error {frame.error.code.value}"
    if frame.card is not None:
        tally.fault("a lane was opened without the secret")
        return "opened"
    return "frame"


def _message(rng: random.Random) -> LaneMessage:
    lane, handle = rng.choice(("a", "b", "")), rng.choice((0, 1, 2**63 - 1))
    sampling = Sampling(max_tokens=rng.choice((1, 5)))
    return rng.choice(
        (
            Open(PROTOCOL_VERSION, lane),
            Open(rng.choice((0, 2, 99)), lane),
            Submit(lane, handle, [1, 2, 3], sampling, budget_ms=rng.choice((-1.0, 0.0, 500.0))),
            Cancel(lane, [handle]),
            Pause(lane, handle),
            Resume(lane, handle),
            Describe(lane),
            Drain(rng.choice((0.0, 1000.0))),
        )
    )


async def _stream(
    rng: random.Random, messages: list[LaneMessage]
) -> AsyncIterator[service_pb2.ModelInferRequest]:
    for message in messages:
        request = to_request(message, rng.choice(("", "open", "x" * 1000)))
        action = rng.randrange(6)
        if action == 0:
            raw = request.raw_input_contents[1][4:]
            bent = mutations.flipped(rng, raw)
            request.raw_input_contents[1] = struct.pack("<I", len(bent)) + bent
        elif action == 1:
            fields = msgspec.to_builtins(message)
            fields[rng.choice([*fields, "unknown"])] = mutations.value(rng)
            with suppress(UnicodeEncodeError, OverflowError):
                bent = msgspec.msgpack.encode(fields)
                request.raw_input_contents[1] = struct.pack("<I", len(bent)) + bent
        elif action == 2:
            request.raw_input_contents[1] = mutations.flipped(rng, request.raw_input_contents[1])
        elif action == 3:
            request.inputs[1].shape[0] = rng.choice((0, 2, -1, 2**40))
        yield request
    await asyncio.sleep(_LOOK_S)


async def plain(target: Target, rng: random.Random, tally: Tally, budget: Budget) -> None:
    """Bent requests of the plain contract, over HTTP and gRPC."""
    url = f"http://{target.host}:{target.triton_http_port}/v2/models/{MODEL_NAME}"
    valid = {
        "text_input": f"Once upon a time {SECRET}",
        "stream": False,
        "exclude_input_in_output": True,
        "return_logprobs": True,
        "sampling_parameters": json.dumps({"max_tokens": 2, "logprobs": 2, "stop": ["x"]}),
    }
    parameters = {"max_tokens": 2, "temperature": 0.5, "top_k": 3, "stop": ["x"], "logprobs": 1}
    timeout = aiohttp.ClientTimeout(total=20)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        while budget.more():
            bent = dict(valid)
            if rng.random() < 0.7:
                bent["sampling_parameters"] = mutations.body(rng, parameters).decode(
                    errors="replace"
                )
            body = mutations.body(rng, bent) if rng.random() < 0.5 else json.dumps(bent).encode()
            path = rng.choice(("generate", "generate_stream"))
            try:
                async with http.post(f"{url}/{path}", data=body) as response:
                    text = await response.text(errors="replace")
                    tally.add(f"{path} {response.status}")
                    if "Traceback" in text or (SECRET in text and response.status >= 400):
                        tally.fault(f"{response.status}: {text[:300]} to {body[:300]!r}")
            except (aiohttp.ClientError, TimeoutError) as error:
                tally.add(f"{path} {type(error).__name__}")
                tally.fault(f"{type(error).__name__} to {body[:300]!r}")


async def models(target: Target, rng: random.Random, tally: Tally, budget: Budget) -> None:
    """Model control, statistics and shared memory by somebody who has no business with them."""
    url = f"http://{target.host}:{target.triton_http_port}/v2"
    calls: tuple[tuple[str, str, dict[str, Any]], ...] = (
        (
            "POST",
            f"repository/models/{MODEL_NAME}/unload",
            {"parameters": {"unload_dependents": True}},
        ),
        ("POST", f"repository/models/{MODEL_NAME}/load", {}),
        ("POST", "repository/index", {}),
        (
            "POST",
            "systemsharedmemory/region/x/register",
            {"key": "/x", "offset": 0, "byte_size": 1},
        ),
        ("POST", "logging", {"log_verbose_level": 9}),
        ("POST", f"models/{MODEL_NAME}/trace/setting", {"trace_level": ["TENSORS"]}),
    )
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as http:
        while budget.more():
            method, path, body = rng.choice(calls)
            async with http.request(method, f"{url}/{path}", json=body) as response:
                await response.read()
                tally.add(f"{path.replace(MODEL_NAME, 'M')} {response.status}")
                if response.status < 300 and path.endswith(("load", "register", "logging")):
                    tally.fault(f"{path} was allowed")


ATTACKS: dict[str, Attack] = {"lanes": lanes, "plain": plain, "models": models}
