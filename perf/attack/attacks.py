"""Attacks on the orchestrator's port. Each makes tries until its budget says that it is done.

What is listed as a fault must not happen; everything else is counted by what came back.
"""

import asyncio
import json
import random
import socket
from contextlib import suppress
from typing import Any

from perf.attack import mutations
from perf.attack.target import SECRET, Attack, Budget, Tally, Target, several
from perf.attack.wire import SILENCE_S, connection, exchange, request

_WORKERS = 8
_PROMPT = f"Once upon a time {SECRET}"


def _valid(target: Target) -> dict[str, dict[str, Any]]:
    common = {"model": target.model, "max_tokens": 2, "deadline_ms": 2000}
    sampling: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 1,
    }
    sampling |= {"stop": ["x"], "logit_bias": {"5": 1.0}, "presence_penalty": 0.1}
    chat = {"messages": [{"role": "user", "content": _PROMPT}]}
    return {
        "/v2/tasks": common
        | sampling
        | {
            "prompt": _PROMPT,
            "priority": "batch",
            "session_id": "s",
            "placement": {"mode": "prefer"},
        },
        "/v1/chat/completions": common
        | sampling
        | chat
        | {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True},
        "/v1/completions": common | sampling | {"prompt": _PROMPT, "stream": False, "logprobs": 1},
    }


async def _good(target: Target, tally: Tally, body: bytes, beside: str) -> None:
    """Send a good request while an attack goes on: it must be answered."""
    sent = request(target, "POST", "/v1/completions", body)
    answer = await exchange(target, sent)
    tally.answer(answer, sent)
    if not answer.startswith(b"HTTP/1.1 200"):
        tally.fault(f"a good request beside {beside} got {answer[:200]!r}")


async def bodies(target: Target, rng: random.Random, tally: Tally, budget: Budget) -> None:
    """Valid JSON bodies bent in one to three places, and headers that say nonsense."""
    valid = _valid(target)
    nonsense = (
        *("X-Deadline", "grpc-timeout", "X-Timeout-Ms", "X-First-Token-Timeout-Ms"),
        *("X-Correlation-Id", "Content-Type", "Content-Encoding", "Last-Event-ID", "Accept"),
    )

    async def one() -> None:
        path = rng.choice(list(valid))
        headers = {"Authorization": f"Bearer {SECRET}"}
        if rng.random() < 0.2:
            headers[rng.choice(nonsense)] = rng.choice(
                ("", "-1", "1e999", "9" * 400, "5S", "nan", "\xff", "2020-01-01", "a b", "*/*")
            )
        data = mutations.body(rng, valid[path])
        sent = request(target, "POST", path, data, headers)
        tally.answer(await exchange(target, sent), sent[-300:])

    await several(budget, one)


async def malformed(target: Target, rng: random.Random, tally: Tally, budget: Budget) -> None:
    """Bytes of valid requests changed, dropped and doubled, in one packet or two."""
    valid = _valid(target)
    methods = ("POST", "GET", "DELETE", "PUT", "OPTIONS", "HEAD", "CONNECT", "TRACE", "PRI", "x")
    paths = (
        *valid,
        "/v2/instances",
        "/metrics",
        "/health",
        "/v2/tasks/x/events",
        "/%00",
        "//",
        "*",
    )

    async def one() -> None:
        path = rng.choice(paths)
        headers = {"Authorization": f"Bearer {SECRET}"}
        if rng.random() < 0.3:
            headers["Transfer-Encoding"] = rng.choice(("chunked", "gzip, chunked", "x", ""))
        if rng.random() < 0.2:
            headers["Expect"] = rng.choice(("100-continue", "x"))
        if rng.random() < 0.2:
            headers["Content-Length"] = rng.choice(("-1", "99999999999999999999", "x", "3", "0x10"))
        method = "POST" if rng.random() < 0.6 else rng.choice(methods)
        data = request(target, method, path, json.dumps(valid.get(path, {})).encode(), headers)
        if rng.random() < 0.8:
            data = mutations.flipped(rng, data)
        cut = rng.randrange(len(data)) if rng.random() < 0.5 else None
        tally.answer(await exchange(target, data, cut=cut, silence_s=SILENCE_S), data[:300])

    await several(budget, one)


async def connections(target: Target, rng: random.Random, tally: Tally, budget: Budget) -> None:
    """Hundreds of sockets that say nothing, half a head or half a body, beside good requests."""
    whole = request(target, "POST", "/v2/tasks", json.dumps({"prompt": _PROMPT}).encode())
    beginnings = {
        "silent": b"",
        "half a head": whole[:40],
        "half a body": whole[:-5],
        "a line end": b"\r\n",
    }
    good = json.dumps(_valid(target)["/v1/completions"] | {"deadline_ms": 20_000}).encode()
    while budget.more():
        open_: list[asyncio.StreamWriter] = []
        try:
            for _ in range(200):
                with suppress(OSError):
                    _, writer = await asyncio.open_connection(target.host, target.port)
                    open_.append(writer)
                    kind = rng.choice(list(beginnings))
                    writer.write(beginnings[kind])
                    tally.add(kind)
            await _good(target, tally, good, "silent connections")
        finally:
            for writer in open_:
                writer.transport.abort()
            await asyncio.sleep(0.05)


async def prompts(target: Target, rng: random.Random, tally: Tally, budget: Budget) -> None:
    """Prompts of megabytes with little time, beside a good request."""
    model = {"model": target.model, "max_tokens": 2}
    texts = ("once upon a time ", "a", "<|im_end|>", "<", "🐯", " ", "\n", SECRET)
    good = json.dumps(model | {"prompt": "Once upon a time. " * 50, "deadline_ms": 20_000}).encode()

    async def big() -> None:
        text = rng.choice(texts)
        text = (text * (4_000_000 // len(text.encode())))[: rng.choice((10_000, 4_000_000))]
        shape = rng.choice(
            (
                ("/v1/completions", {"prompt": text}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
                ("/v2/tasks", {"prompt_token_ids": [5] * (len(text) // 3)}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 40_000}),
            )
        )
        body = json.dumps(model | shape[1] | {"deadline_ms": rng.choice((100, 1000))})
        sent = request(target, "POST", shape[0], body.encode())
        tally.answer(await exchange(target, sent), sent[:300])

    while budget.more():
        async with asyncio.TaskGroup() as group:
            for _ in range(_WORKERS):
                group.create_task(big())
            await _good(target, tally, good, "long prompts")


async def large_bodies(target: Target, rng: random.Random, tally: Tally, budget: Budget) -> None:
    """Dozens of legal bodies of 4 MB at once, dear to decode, beside a good request."""
    few = json.dumps({"model": target.model, "max_tokens": 2})[:-1]
    kinds = (
        ("/v1/completions", ', "prompt": [' + "[]," * 1_390_000 + "[]]}"),
        ("/v1/completions", ', "prompt": [' + "99999," * 690_000 + "1]}"),
        ("/v1/completions", ', "prompt": ["' + '","' * 1_390_000 + '"]}'),
        ("/v2/tasks", ', "prompt_token_ids": [' + "9," * 2_090_000 + "9]}"),
        ("/v1/chat/completions", ', "metadata": ' + "[" * 2_090_000 + "]" * 2_090_000 + "}"),
        (
            "/v1/chat/completions",
            ', "messages": [' + '{"role":"user","content":[]},' * 140_000 + "]}",
        ),
    )
    good = json.dumps({"model": target.model, "prompt": _PROMPT, "max_tokens": 2}).encode()

    async def large() -> None:
        path, rest = rng.choice(kinds)
        headers = {"X-Timeout-Ms": rng.choice(("500", "60000"))}
        sent = request(target, "POST", path, (few + rest).encode(), headers)
        tally.answer(await exchange(target, sent), sent[:300])

    while budget.more():
        async with asyncio.TaskGroup() as group:
            for _ in range(5 * _WORKERS):
                group.create_task(large())
            await _good(target, tally, good, "large bodies")


async def clients(target: Target, rng: random.Random, tally: Tally, budget: Budget) -> None:
    """Clients that hang up, say no more, do not read, ask twice in one packet or cancel."""
    body = {"model": target.model, "prompt": _PROMPT, "max_tokens": 200, "ignore_eos": True}
    stream = json.dumps(body | {"stream": True}).encode()
    whole = json.dumps(body | {"max_tokens": 20}).encode()

    async def one() -> None:
        kind = rng.choice(("hangs up", "resets", "says no more", "does not read", "pipelines"))
        tally.add(kind)
        data = request(
            target,
            "POST",
            "/v1/completions",
            rng.choice((stream, whole)),
            {"Connection": "keep-alive"},
        )
        with suppress(OSError):
            async with connection(target) as (_, writer):
                if kind == "does not read":
                    raw = writer.get_extra_info("socket")
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                    writer.transport.pause_reading()  # type: ignore[attr-defined]
                writer.write(data * (rng.randint(2, 5) if kind == "pipelines" else 1))
                if kind == "says no more":
                    writer.write_eof()
                await asyncio.sleep(rng.choice((0.0, 0.01, 0.1, 0.4)))
                if kind == "resets":
                    writer.transport.abort()

    await several(budget, one)


async def browsers(target: Target, rng: random.Random, tally: Tally, budget: Budget) -> None:
    """What a page from elsewhere can have a browser send to a service on loopback."""
    task = json.dumps({"model": target.model, "prompt": _PROMPT, "max_tokens": 1}).encode()
    instance = target.triton_grpc
    posts = (
        ("/v2/tasks", task),
        ("/v1/completions", task),
        (f"/v2/instances/{instance}/drain", b""),
        (f"/v2/instances/{instance}/undrain", b""),
    )

    async def one() -> None:
        path, body = rng.choice(posts)
        headers = {
            "Content-Type": rng.choice(
                ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
            )
        }
        how = rng.choice(("a simple request", "another host", "no type", "a forbidden origin"))
        if how == "another host":
            headers |= {"Host": "evil.example", "Content-Type": "application/json"}
        elif how == "a forbidden origin":
            headers |= {"Origin": "https://evil.example", "Content-Type": "application/json"}
        else:
            headers |= {"Origin": rng.choice(("null", "https://evil.example"))}
        sent = request(target, "POST", path, body, headers)
        if how == "no type":
            sent = sent.replace(b"Content-Type: " + headers["Content-Type"].encode() + b"\r\n", b"")
        answer = await exchange(target, sent)
        tally.answer(answer, sent)
        if answer.startswith(b"HTTP/1.1 2"):
            tally.fault(f"{how} was served: {sent[:300]!r}")

    await several(budget, one)


ATTACKS: dict[str, Attack] = {
    "bodies": bodies,
    "malformed": malformed,
    "connections": connections,
    "prompts": prompts,
    "large-bodies": large_bodies,
    "clients": clients,
    "browsers": browsers,
}
