"""Servers of other kinds that behave like the real ones, and fail on demand: on real sockets.

Each makes the tokens that its ``Script`` says, one letter each, in its own API's words. What came
is kept, so that a test can say what did not.
"""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer

from tests.support.fake_worker import TEMPLATE, tokenizer_json

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MODEL = "other"
TOKENIZER = Tokenizer.from_buffer(tokenizer_json())
LETTER_IDS = [TOKENIZER.token_to_id(letter) for letter in LETTERS]
EOS = 1


def model_folder(path: Path, **config: object) -> Path:
    """A folder with the fake worker's tokenizer, as operators name one."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_bytes(tokenizer_json())
    settings = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    values = {"vocab_size": 262, "max_position_embeddings": 512, "eos_token_id": EOS}
    (path / "config.json").write_text(json.dumps(values | config))
    return path


@dataclass
class Script:
    """What one job does. Counts are tokens, times seconds."""

    tokens: int | None = None
    """How many letters it makes before its end token; None: as many as it may, and no end token."""
    step_s: float = 0.0
    stall_at: int | None = None
    """Makes this many, then nothing for as long as somebody listens."""
    cut_at: int | None = None
    """Drops the connection after this many, in the middle of the next event."""
    fail_at: int | None = None
    """Tells of an error after this many, as the server does it in the middle of a stream."""
    status: int = 200
    """Answers with this, and no stream."""
    slices: int = 0
    """Bytes that are written at once; 0: an event each."""
    ends_early: bool = False
    """The stream just ends, without the end of the text."""
    spoken: Callable[[int], str] = lambda at: LETTERS[at % 26]
    alter: Callable[[list[Any]], list[Any]] = lambda events: events
    """What the events of each token are made into."""
    limit: int | None = None
    """Makes this many, whatever was asked for."""
    stays_open: bool = False
    """The stream does not end after the text."""


@dataclass
class Asked:
    """One job as it came."""

    body: dict[str, Any]
    script: Script
    made: int = 0
    is_aborted: bool = False
    """Its client was gone before its end."""
    headers: dict[str, str] = field(default_factory=dict)


class OtherServer:
    """The base: a port of its own, ``plan`` for what each job does."""

    kind = ""

    def __init__(self) -> None:
        self.plan: Callable[[dict[str, Any]], Script] = lambda body: Script()
        self.asked: list[Asked] = []
        self.told: Counter[str] = Counter()
        """How often each fact was asked for, by path."""
        self.running = 0
        self.is_silent = False
        """Takes connections and answers nothing but jobs."""
        self.is_unhealthy = False
        self.model = MODEL
        self.port = 0
        self.changed = asyncio.Condition()

    def entry(self, folder: Path, **more: object) -> str:
        stated = "".join(f"&{name}={value}" for name, value in more.items())
        return f"{self.kind}+http://127.0.0.1:{self.port}?tokenizer={folder}{stated}"

    async def start(self) -> None:
        raise NotImplementedError

    async def stop(self) -> None:
        raise NotImplementedError

    async def until(self, done: Callable[[], bool]) -> None:
        async with self.changed:
            await self.changed.wait_for(done)

    async def tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()


class HttpServer(OtherServer):
    """Its API is ``_routes``; each event's bytes come from ``_events``."""

    runner: web.AppRunner | None = None
    path = ""
    in_parts = False
    """Answers come in two parts."""
    is_site = False
    """Answers are pages."""

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post(self.path, self._generate)
        for path, answer in self._told().items():
            app.router.add_get(path, self._telling(answer))
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        runner, self.runner = self.runner, None
        if runner is not None:
            await runner.cleanup()

    def _told(self) -> dict[str, Callable[[], object]]:
        raise NotImplementedError

    def _events(self, asked: Asked, at: int, total: int) -> list[object]:
        """What is sent for token ``at`` of ``total``; ``total`` itself is the end token."""
        raise NotImplementedError

    def _prologue(self, asked: Asked) -> list[object]:
        return []

    def _error(self) -> object:
        return {"error": {"message": "the engine failed", "type": "server_error", "code": 500}}

    def _telling(self, answer: Callable[[], object]) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.StreamResponse:
            self.told[request.path] += 1
            if self.is_silent:
                await asyncio.Event().wait()
            if self.is_unhealthy:
                return web.json_response({"error": "unhealthy"}, status=503)
            said = "<html>It works!</html>" if self.is_site else answer()
            body = said.encode() if isinstance(said, str) else json.dumps(said).encode()
            if not self.in_parts:
                return web.Response(body=body)
            response = web.StreamResponse()
            response.content_length = len(body)
            await response.prepare(request)
            await response.write(body[: len(body) // 2])
            await asyncio.sleep(0.01)
            await response.write(body[len(body) // 2 :])
            return response

        return handle

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        script = self.plan(body)
        asked = Asked(body, script, headers={k.lower(): v for k, v in request.headers.items()})
        self.asked.append(asked)
        if script.status != 200:
            error = {"error": {"message": "not now", "type": "x"}}
            return web.json_response(error, status=script.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self.running += 1
        try:
            await response.prepare(request)
            await self._stream(asked, response, request)
            with suppress(ConnectionError):
                await response.write_eof()
        except (asyncio.CancelledError, ConnectionError):
            asked.is_aborted = True
            raise
        finally:
            self.running -= 1
            await asyncio.shield(self.tell())
        return response

    async def _stream(
        self, asked: Asked, response: web.StreamResponse, request: web.Request
    ) -> None:
        script = asked.script
        limit = script.limit or self._limit(asked.body)
        total = limit if script.tokens is None else min(limit, script.tokens)
        has_end = script.tokens is not None and script.tokens < limit
        for event in self._prologue(asked):
            await self._send(response, event, script)
        for at in range(total + has_end):
            if script.stall_at == at:
                await self.tell()
                await asyncio.Event().wait()
            if script.fail_at == at:
                await self._send(response, self._error(), script)
                return
            if script.step_s:
                await asyncio.sleep(script.step_s)
            if script.cut_at == at:
                await response.write(b'data: {"half": ')
                assert request.transport is not None
                request.transport.close()
                return
            asked.made += 1
            if script.ends_early and at == total - 1:
                return
            for event in script.alter(self._events(asked, at, total)):
                await self._send(response, event, script)
            await self.tell()
        if script.stays_open:
            await asyncio.Event().wait()

    async def _send(self, response: web.StreamResponse, event: object, script: Script) -> None:
        data = event if isinstance(event, str) else json.dumps(event)
        raw = f"data: {data}\n\n".encode()
        size = script.slices or len(raw)
        for start in range(0, len(raw), size):
            await response.write(raw[start : start + size])
            if script.slices:
                await asyncio.sleep(0)

    def _limit(self, body: dict[str, Any]) -> int:
        raise NotImplementedError


class VllmServer(HttpServer):
    """``vllm serve``."""

    kind = "vllm"
    path = "/v1/completions"
    version = "0.11.0"

    def _told(self) -> dict[str, Callable[[], object]]:
        return {
            "/health": lambda: "",
            "/version": lambda: {"version": self.version},
            "/metrics": lambda: (
                f'vllm:num_requests_running{{engine="0"}} {float(self.running)}\n'
                'vllm:num_requests_waiting{engine="0"} 0.0\n'
            ),
            "/v1/models": lambda: {
                "object": "list",
                "data": [{"id": self.model, "object": "model", "max_model_len": 400}],
            },
        }

    def _limit(self, body: dict[str, Any]) -> int:
        return int(body["max_tokens"])

    def _events(self, asked: Asked, at: int, total: int) -> list[object]:
        body, is_end = asked.body, at == total
        text = "" if is_end else asked.script.spoken(at)
        token = EOS if is_end else LETTER_IDS[at % 26]
        reason = "stop" if is_end else None
        if asked.script.tokens is None and at == total - 1:
            reason = "length"
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": reason}
        if body.get("return_token_ids"):
            choice["token_ids"] = [token]
        if body.get("logprobs") is not None:
            named = f"token_id:{token}"
            tops = {f"token_id:{one}": -0.1 * one for one in range(2, 2 + body["logprobs"])}
            choice["logprobs"] = {
                "tokens": [named],
                "token_logprobs": [-0.5],
                "top_logprobs": [{named: -0.5} | tops],
                "text_offset": [at],
            }
        chunk: dict[str, Any] = {"id": "c", "object": "text_completion", "choices": [choice]}
        options = body.get("stream_options") or {}
        if options.get("continuous_usage_stats"):
            chunk["usage"] = {"prompt_tokens": 3, "completion_tokens": at + 1}
        events: list[object] = [chunk]
        if reason is not None:
            usage = {
                "prompt_tokens": len(body["prompt"]),
                "completion_tokens": at + 1,
                "prompt_tokens_details": {"cached_tokens": 2},
            }
            events += [{"id": "c", "choices": [], "usage": usage}, "[DONE]"]
        return events


class LlamaCppServer(HttpServer):
    """``llama-server``; letters of ``held`` are kept back as a possible stop string is."""

    kind = "llamacpp"
    path = "/completion"

    def _told(self) -> dict[str, Callable[[], object]]:
        return {
            "/health": lambda: {"status": "ok"},
            "/props": lambda: {
                "total_slots": 4,
                "model_path": f"/models/{self.model}.gguf",
                "default_generation_settings": {"n_ctx": 300},
                "build_info": "b1-abc",
            },
            "/metrics": lambda: f"llamacpp:requests_processing {self.running}\n",
        }

    def _limit(self, body: dict[str, Any]) -> int:
        return int(body["n_predict"])

    def _events(self, asked: Asked, at: int, total: int) -> list[object]:
        counts = {"tokens_predicted": at + 1, "tokens_evaluated": len(asked.body["prompt"])}
        is_last = at == total or (asked.script.tokens is None and at == total - 1)
        is_held = asked.script.spoken(at) == "" and at < total
        events: list[object] = []
        if at < total and not is_held:
            piece = {"content": asked.script.spoken(at), "tokens": [LETTER_IDS[at % 26]]}
            events.append({"index": 0, "stop": False, **piece, **counts})
        if is_last:
            kind = "eos" if at == total else "limit"
            events.append({"content": "", "tokens": [], "stop": True, "stop_type": kind, **counts})
        return events


class TgiServer(HttpServer):
    """``text-generation-launcher``."""

    kind = "tgi"
    path = "/generate_stream"

    def _told(self) -> dict[str, Callable[[], object]]:
        return {
            "/health": lambda: "",
            "/info": lambda: {
                "model_id": self.model,
                "version": "3.3.0",
                "max_total_tokens": 300,
                "quantize": "awq",
            },
        }

    def _limit(self, body: dict[str, Any]) -> int:
        return int(body["parameters"]["max_new_tokens"])

    def _error(self) -> object:
        return {"error": "the engine failed", "error_type": "generation"}

    def _events(self, asked: Asked, at: int, total: int) -> list[object]:
        is_end = at == total
        text = "<|eos|>" if is_end else asked.script.spoken(at)
        token = {
            "id": EOS if is_end else LETTER_IDS[at % 26],
            "text": text,
            "logprob": -0.5,
            "special": is_end,
        }
        event: dict[str, Any] = {"index": at + 1, "token": token, "details": None}
        top = asked.body["parameters"].get("top_n_tokens", 0)
        if top:
            event["top_tokens"] = [
                {"id": one, "text": "x", "logprob": -0.1 * one, "special": False}
                for one in range(2, 2 + top)
            ]
        if is_end or (asked.script.tokens is None and at == total - 1):
            event["details"] = {
                "finish_reason": "eos_token" if is_end else "length",
                "generated_tokens": at + 1,
                "input_length": 3,
            }
            event["generated_text"] = "".join(
                map(asked.script.spoken, itertools.islice(itertools.count(), total))
            )
        return [event]
