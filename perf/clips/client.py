"""One recipe and its outcome, with plain ``tritonclient``."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

MODEL: Final = "slot"
Recipe = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ClipRequest:
    """Request of a client, and when the client cancels or leaves."""

    recipe: Recipe | bytes
    deadline_s: float = 60.0
    degrade: bool = False
    outputs: str = "mp4"
    cancel_in: str = ""
    """Stage after whose first event the client cancels."""
    drop: bool = False
    """Whether the client closes the connection instead of cancelling."""

    @property
    def data(self) -> bytes:
        return self.recipe if isinstance(self.recipe, bytes) else json.dumps(self.recipe).encode()

    @property
    def parameters(self) -> dict[str, Any]:
        return {
            "deadline_ms": round(1000 * self.deadline_s),
            "on_deadline": "degrade" if self.degrade else "error",
            "outputs": self.outputs,
        }


@dataclass(slots=True)
class ClipReply:
    """Answer to a request. ``facts`` is the result event; times are on ``time.monotonic``."""

    asked_at: float
    ended_at: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    """Size in bytes of each tensor received."""
    error: str = ""
    is_cancelled: bool = False

    @property
    def is_clip(self) -> bool:
        return self.facts.get("event") == "result"

    @property
    def latency_s(self) -> float:
        return self.ended_at - self.asked_at

    @property
    def code(self) -> str:
        """Outcome in a word: ``result``, ``cancelled``, or the error's code."""
        if self.is_cancelled:
            return "cancelled"
        return "result" if self.is_clip else self.error.partition(":")[0]


async def _render(client: triton.InferenceServerClient, ask: ClipRequest) -> ClipReply:
    """Render a clip; never raises for an answer of the server."""
    given = triton.InferInput("recipe", [1], "BYTES")
    given.set_data_from_numpy(np.array([ask.data], dtype=np.object_))

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": MODEL, "inputs": [given], "parameters": ask.parameters}

    reply = ClipReply(time.monotonic())
    # Do not wait for the end of the stream: the last answer is marked as the last.
    responses = client.stream_infer(requests(), headers={"triton_grpc_error": "false"})
    try:
        async for result, error in responses:
            reply.ended_at = time.monotonic()
            if error is not None:
                reply.error = _words(error)
                break
            event = json.loads(result.as_numpy("event")[0])
            if event["event"] == "stage":
                if event["stage"] == ask.cancel_in:
                    reply.is_cancelled = True
                    break
                continue
            reply.facts = event
            for output in result.get_response().outputs:
                if output.name != "event":
                    reply.bytes[output.name] = result.as_numpy(output.name).nbytes
            if event["event"] == "result":
                break
    except InferenceServerException as error:
        reply.error, reply.ended_at = _words(error), time.monotonic()
    finally:
        if ask.drop:
            await client.close()
        else:
            responses.cancel()
    return reply


def _words(error: InferenceServerException) -> str:
    return str(error.message())


async def render(address: str, ask: ClipRequest) -> ClipReply:
    """Render ``ask`` on its own connection."""
    async with triton.InferenceServerClient(address) as client:
        return await _render(client, ask)


async def render_all(address: str, asks: list[ClipRequest]) -> list[ClipReply]:
    """Render all of ``asks`` at once, on one connection."""
    async with triton.InferenceServerClient(address) as client:
        return await asyncio.gather(*(_render(client, ask) for ask in asks))
