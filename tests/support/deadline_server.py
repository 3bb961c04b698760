"""A server with OpenAI's chat API that keeps deadlines, or breaks them as its ``Manner`` says.

Each of its slots makes a token per step; who comes when all are taken waits, first come, first
served.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.support.sites import running_app

MODEL = "fake"
Json = dict[str, Any]


@dataclass(frozen=True)
class Manner:
    """What the server does; the defaults keep every rule."""

    slots: int = 4
    step_s: float = 0.005
    waiting: int = 12
    """Requests that may wait; the next one is refused for lack of room."""
    heeds: bool = True
    """Ends at deadlines that are stated as milliseconds from now."""
    tells: bool = True
    """Says that a deadline was the end."""
    reads: bool = True
    """Refuses a deadline that it cannot read."""
    predicts: bool = True
    """Refuses at once who would wait too long."""
    linger_s: float = 0.0
    """Time for which the slot of a client that is gone stays taken."""
    works_for_nobody: bool = False
    """Does the work of clients that left while they waited."""
    takes_ignore_eos: bool = True


class DeadlineServer:
    """``port`` is where it serves; ``made`` counts tokens."""

    def __init__(self, manner: Manner) -> None:
        self.manner = manner
        self.port = 0
        self.made = 0
        self._slots = asyncio.Semaphore(manner.slots)
        self._left: dict[asyncio.Task[None], int] = {}
        self._begun: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def close(self) -> None:
        for job in self._left:
            job.cancel()
        await asyncio.gather(*self._left, return_exceptions=True)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        try:
            body = json.loads(await request.read())
            tokens = body.get("max_tokens")
            assert isinstance(tokens, int) and isinstance(body["messages"], list)
            assert self.manner.takes_ignore_eos or "ignore_eos" not in body
            until = self._until(request)
        except (ValueError, AssertionError) as error:
            return self._error(400, f"it cannot be read: {error}")
        if refusal := self._refusal(tokens, until):
            return refusal
        return await self._served(request, body, tokens, until)

    def _until(self, request: web.Request) -> float:
        """When the answer is to end, on the loop's clock. Raises ``ValueError``."""
        loop, until = asyncio.get_running_loop(), math.inf
        try:
            if (left := request.headers.get("X-Timeout-Ms")) and self.manner.heeds:
                until = loop.time() + int(left) / 1000
        except ValueError:
            if self.manner.reads:
                raise
        return until

    def _refusal(self, tokens: int, until: float) -> web.Response | None:
        now, manner = asyncio.get_running_loop().time(), self.manner
        if until - now < 2 * manner.step_s:
            return self._error(504, "its deadline is over")
        if len(self._left) >= manner.slots + manner.waiting:
            return self._error(429, "it is full")
        wait_s = manner.step_s * sum(self._left.values()) / manner.slots
        if self.manner.predicts and wait_s and now + wait_s + 1.3 * tokens * manner.step_s > until:
            return self._error(504, "it would miss its deadline")
        return None

    def _error(self, status: int, message: str) -> web.Response:
        error = {"error": {"message": message, "type": "an_error", "code": status}}
        return web.json_response(error, status=status)

    async def _served(
        self, request: web.Request, body: Json, tokens: int, until: float
    ) -> web.StreamResponse:
        out = asyncio.Queue[str]()
        job = asyncio.create_task(self._job(tokens, out))
        self._left[job] = tokens
        job.add_done_callback(self._left.pop)
        job.add_done_callback(self._begun.discard)
        try:
            if body.get("stream"):
                return await self._stream(request, body, tokens, until, out)
            texts = [text async for text in self._texts(tokens, until, out)]
            return self._whole(body, texts, is_cut=len(texts) < tokens)
        finally:
            if job in self._begun or not self.manner.works_for_nobody:
                job.cancel()

    async def _job(self, tokens: int, out: asyncio.Queue[str]) -> None:
        task = asyncio.current_task()
        assert task is not None
        async with self._slots:
            self._begun.add(task)
            try:
                for _ in range(tokens):
                    await asyncio.sleep(self.manner.step_s)
                    self.made += 1
                    self._left[task] -= 1
                    out.put_nowait("tide ")
            except asyncio.CancelledError:
                await asyncio.sleep(self.manner.linger_s)
                raise

    async def _texts(
        self, tokens: int, until: float, out: asyncio.Queue[str]
    ) -> AsyncIterator[str]:
        """Texts as they come, until the deadline."""
        for _ in range(tokens):
            try:
                async with asyncio.timeout_at(None if until == math.inf else until):
                    text = await out.get()
            except TimeoutError:
                return
            yield text

    def _end(self, body: Json, *, is_cut: bool) -> str:
        """``finish_reason`` of an answer; empty where it is an error."""
        if not is_cut or not self.manner.tells:
            return "length"
        return "deadline" if body.get("on_deadline") == "partial" else ""

    def _whole(self, body: Json, texts: list[str], *, is_cut: bool) -> web.Response:
        finish = self._end(body, is_cut=is_cut)
        if not finish:
            return self._error(504, "its deadline came")
        message = {"role": "assistant", "content": "".join(texts)}
        choice = {"index": 0, "message": message, "finish_reason": finish}
        usage = {"completion_tokens": len(texts)}
        return web.json_response({"choices": [choice], "usage": usage})

    async def _stream(
        self, request: web.Request, body: Json, tokens: int, until: float, out: asyncio.Queue[str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        made = 0
        async for text in self._texts(tokens, until, out):
            if not made:
                await response.prepare(request)
            made += 1
            await _send(response, {"choices": [{"index": 0, "delta": {"content": text}}]})
        finish = self._end(body, is_cut=made < tokens)
        if not made:
            return self._error(504, "its deadline came")
        if finish:
            await _send(response, {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
            await _send(response, {"choices": [], "usage": {"completion_tokens": made}})
        else:
            await _send(response, {"error": {"message": "its deadline came", "type": "an_error"}})
        await response.write(b"data: [DONE]\n\n")
        return response


async def _send(response: web.StreamResponse, event: Json) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@asynccontextmanager
async def serving(manner: Manner | None = None) -> AsyncIterator[DeadlineServer]:
    """A server during the body."""
    server = DeadlineServer(manner or Manner())
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.chat)
    async with running_app(app) as port:
        server.port = port
        try:
            yield server
        finally:
            await server.close()
