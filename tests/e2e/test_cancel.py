"""WP-1 and WP-2: cancel and disconnect stop the generation and free its slot."""

import asyncio
import json
import socket

import aiohttp
import pytest

from tests.e2e.conftest import Stack
from tests.support.sse import read_events
from tests.support.stack import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards")]

ENDLESS = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}
"""At 20 ms a step these take half a minute: only a stop ends them within a test's patience."""


@pytest.fixture
def stack(paced: Stack) -> Stack:
    return paced


async def test_wp2_cancel_stops_the_stream_and_is_idempotent(
    http: aiohttp.ClientSession,
) -> None:
    """WP-2: 202, no token after the acknowledgement reaches the stream, one terminal event."""
    async with http.post("/v2/tasks", json=ENDLESS) as response:
        task = await response.json()
    kinds = []
    async with http.get(task["events_url"]) as stream:
        async for event in read_events(stream):
            kinds.append(event.kind)
            if kinds.count("token") == 5 and "cancelled" not in kinds:
                async with http.post(f"/v2/tasks/{task['task_id']}/cancel") as response:
                    assert response.status == 202
                kinds.append("cancelled")
    assert kinds[-1] == "error"
    assert kinds.count("error") == 1
    for call in (http.post, http.delete):
        path = f"/v2/tasks/{task['task_id']}" + ("/cancel" if call == http.post else "")
        async with call(path) as response:
            assert response.status == 202
    async with http.get(f"/v2/tasks/{task['task_id']}") as response:
        status = await response.json()
    assert (status["status"], status["outcome"]) == ("ended", "aborted")


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_wp1_a_closed_socket_stops_the_generation(paced: Stack, path: str, streaming: bool) -> None:
    """WP-1, with a bare socket: mid-stream, and while waiting for the whole answer."""
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {}
    body = json.dumps(
        {k: v for k, v in ENDLESS.items() if k != "prompt" or not prompt}
        | prompt
        | {"stream": streaming}
    ).encode()
    with socket.create_connection(("127.0.0.1", paced.orchestrator.port)) as client:
        client.sendall(
            b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (path.encode(), len(body), body)
        )
        if streaming:
            seen = b""
            while seen.count(b"data: ") < 3:
                seen += client.recv(4096)
        else:
            eventually(
                lambda: paced.orchestrator.metric("tidegate_worker_jobs", kind="running") == 1,
                "the generation to run",
            )
    paced.assert_idle()


async def test_a_task_goes_on_without_its_readers(http: aiohttp.ClientSession) -> None:
    """WP-1: `/v2/tasks` continue by default; `on_disconnect: cancel` stops with the reader."""
    short = ENDLESS | {"max_tokens": 40}
    async with http.post("/v2/tasks", json=short) as response:
        task = await response.json()
    async with http.get(task["events_url"]) as stream:
        async for event in read_events(stream):
            if event.kind == "token":
                break
    while True:
        async with http.get(f"/v2/tasks/{task['task_id']}") as response:
            status = await response.json()
        if status["status"] == "ended":
            break
        await asyncio.sleep(0.05)
    assert (status["outcome"], status["usage"]["completion_tokens"]) == ("met", 40)

    async with http.post("/v2/tasks", json=ENDLESS | {"on_disconnect": "cancel"}) as response:
        task = await response.json()
    async with http.get(task["events_url"]) as stream:
        async for event in read_events(stream):
            if event.kind == "token":
                break
        stream.close()
