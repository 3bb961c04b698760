"""Relay without lanes at its least cost: the yardstick for the orchestrator's figures.

    python -m perf.stack.baseline PORT

An aiohttp server that answers ``POST /v1/completions`` with the same event stream, the plain way:
per token one ``json.dumps`` of the chunk and one ``await response.write``. Its tokens cost nothing
(no engine, no gRPC, no other process), so a real relay of this kind is slower than this.
"""

import json
import sys
import time

from aiohttp import web

_TEXT = " tide"


async def _completions(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    max_tokens = int(body["max_tokens"])
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    chunk: dict[str, object] = {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "text_completion",
        "created": int(time.time()),
        "model": str(body["model"]),
    }
    for _ in range(max_tokens):
        choice = {"index": 0, "text": _TEXT, "logprobs": None, "finish_reason": None}
        event = {**chunk, "choices": [choice]}
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}
    usage = {"prompt_tokens": 1, "completion_tokens": max_tokens, "total_tokens": max_tokens + 1}
    for last in ({**chunk, "choices": [choice]}, {**chunk, "choices": [], "usage": usage}):
        await response.write(b"data: " + json.dumps(last).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _live(_: web.Request) -> web.Response:
    return web.Response(text="ok")


def main() -> None:
    app = web.Application()
    app.router.add_post("/v1/completions", _completions)
    app.router.add_get("/health/live", _live)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)


if __name__ == "__main__":
    main()
