"""Fake pods behind a gateway, and an endpoint picker that serves them, all on loopback."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from orchestrator.clock import LoopClock
from orchestrator.settings import Settings, whole_settings
from perf.stack.constants import set_constants
from picker.picker import EndpointPicker
from picker.pods import Pods
from picker.section import PickerSection
from picker.server import PickerServer
from tests.support.sites import running_app


class FakePod:
    """A server with vLLM's metrics and chats of ``tokens`` tokens. Its facts may be changed at any
    time."""

    def __init__(self, **metrics: float) -> None:
        self.metrics: dict[str, float] = {"num_requests_running": 0, "num_requests_waiting": 0}
        self.metrics |= metrics
        self.model = "m"
        self.tokens = 3
        self.status = 200
        self.has_metrics = True
        self.headers: list[dict[str, str]] = []
        """Headers of each request that came."""
        self.bodies: list[bytes] = []
        self.address = ""
        self.may_end = asyncio.Event()
        """Streamed answers wait for it after their first token."""
        self.may_end.set()

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @asynccontextmanager
    async def serve(self) -> AsyncIterator["FakePod"]:
        app = web.Application()
        app.add_routes([web.route("*", "/{path:.*}", self._answer)])
        async with running_app(app) as port:
            self.address = f"127.0.0.1:{port}"
            yield self

    def page(self) -> str:
        labels = f'{{engine="0",model_name="{self.model}"}}'
        return "".join(f"vllm:{name}{labels} {value}\n" for name, value in self.metrics.items())

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path.startswith("/metrics"):
            if not self.has_metrics or request.path != "/metrics":
                return web.Response(status=404)
            return web.Response(text=self.page())
        self.headers.append(dict(request.headers))
        body = await request.read()
        self.bodies.append(body)
        if self.status != 200 or not body:
            return web.json_response({"pod": self.address}, status=self.status)
        usage = {"prompt_tokens": 7, "completion_tokens": self.tokens}
        if not json.loads(body).get("stream"):
            choices = [{"message": {"content": "a b c"}, "finish_reason": "stop"}]
            return web.json_response({"choices": choices, "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events(self.tokens, usage):
            await response.write(event)
            await self.may_end.wait()
        return response


def events(tokens: int, usage: dict[str, int]) -> list[bytes]:
    """A streamed chat of so many tokens."""

    def event(value: Any) -> bytes:
        return f"data: {json.dumps(value)}\n\n".encode()

    pieces = [event({"choices": [{"delta": {"content": "a"}}]}) for _ in range(tokens)]
    last = event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    return [*pieces, last, event({"choices": [], "usage": usage}), b"data: [DONE]\n\n"]


class ServedPicker:
    """A picker that serves on ``port``."""

    def __init__(self, settings: Settings) -> None:
        clock = LoopClock(asyncio.get_running_loop())
        self.pods = Pods(settings.section(PickerSection), clock)
        self.picker = EndpointPicker(settings, self.pods, clock)
        self.server = PickerServer(self.picker)
        self.port = 0

    async def poll(self) -> None:
        """Have every pod tell its metrics."""
        for pod in self.pods:
            await self.pods.poll(pod)
        await self.server.check()


@asynccontextmanager
async def serve_picker(*addresses: str, **sections: Any) -> AsyncIterator[ServedPicker]:
    """A picker of these pods, whose metrics are read when ``poll`` is called alone."""
    restore = set_constants({"picker.pods.POLL_EVERY_S": 3600.0})
    picker = {"port": 0, "endpoints": addresses}
    picker |= sections.pop("picker", {})
    settings = await asyncio.to_thread(lambda: whole_settings()(picker=picker, **sections))
    served = ServedPicker(settings)
    for address in addresses:
        served.pods.add(address)
    served.pods.start()
    await served.poll()
    served.port = await served.server.start()
    try:
        yield served
    finally:
        await served.server.stop(0.0)
        await served.pods.close()
        restore()
