"""WP-1 and WP-2: cancel and disconnect stop the generation and free its slot."""

import json
import socket

import aiohttp
import pytest

from tests.e2e.conftest import Stack
from tests.support.sse import read_events

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards")]

ENDLESS = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}
"""At 20 ms a step these take half a minute: only a stop ends them within a test's patience."""


@pytest.fixture
def stack(paced: Stack) -> Stack:
    return paced


async def test_wp2_cancel_stops_the_stream_and_is_idempotent(http: aiohttp.ClientSession) -> None:
    """WP-2: 202, no token after the acknowledgement reaches the stream, one terminal event."""
    async with http.post("/v2/tasks", json=ENDLESS) as response:
        task = await response.json()
    kinds = []
    async with http.get(task["events_url"]) as stream:
        async for event in read_events(stream):
            kinds.append(event.event)
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


def test_wp1_a_closed_socket_stops_the_generation(paced: Stack) -> None:
    """WP-1, with a bare socket."""
    body = json.dumps(ENDLESS | {"stream": True}).encode()
    with socket.create_connection(("127.0.0.1", paced.orchestrator.port)) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        seen = b""
        while seen.count(b"data: ") < 3:
            seen += client.recv(4096)
    paced.assert_idle()
