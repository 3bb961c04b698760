"""OR-16: prompts, texts and secrets are in nothing that a run writes: logs at level debug, metrics,
traces, of orchestrator and Triton alike."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import aiohttp
import pytest

from tests.e2e.conftest import Stack
from tests.support.processes import eventually
from tests.support.stack import Orchestrator, running

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

KEY, WRONG_KEY = "sk-planted-right-4711", "sk-planted-wrong-0815"
PLANTED = "xylophone marmalade"
"""In every place where a client's text can be; a prompt's words that no sentence of ours has."""
WINDOW = 14
"""So many characters of a text in a row are that text, and no word that a log may have too."""
STORY = f"Once upon a time there was a {PLANTED}"
CHAT = [{"role": "system", "content": PLANTED}, {"role": "user", "content": STORY}]


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[bytes]]]:
    """Where traces go: its address, and what it got."""
    received: list[bytes] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    thread.join()
    server.server_close()


class Client:
    """Sends what a client could, and keeps what was generated for it."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self.texts: list[str] = []
        self.ids: list[int] = []

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, str]:
        data = body if isinstance(body, str) else json.dumps(body)
        async with self._session.post(path, data=data, headers=headers) as answer:
            return answer.status, await answer.text()

    async def talk(self) -> None:
        """Every way to a text."""
        base = {"model": "demo", "max_tokens": 24, "user": PLANTED}
        status, text = await self.post("/v1/chat/completions", base | {"messages": CHAT})
        assert status == 200, text
        self.texts.append(json.loads(text)["choices"][0]["message"]["content"])
        more = {"prompt": STORY, "stream": True, "return_token_ids": True, "logprobs": 1}
        status, text = await self.post("/v1/completions?hidden=" + KEY, base | more)
        assert status == 200, text
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line[:7] == "data: {"]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        self.texts.append("".join(choice["text"] for choice in choices))
        self.ids = [token for choice in choices for token in choice.get("token_ids") or []]
        message = {"model": "demo", "max_tokens": 24, "system": PLANTED, "messages": CHAT[1:]}
        status, text = await self.post("/v1/messages", message)
        assert status == 200, text
        self.texts.append(json.loads(text)["content"][0]["text"])
        task = {"prompt": STORY, "max_tokens": 24, "stop": [PLANTED], "session_id": "a-session"}
        status, text = await self.post("/v2/tasks", task)
        assert status == 202, text
        async with self._session.get(json.loads(text)["events_url"]) as events:
            await events.read()
        await self.post("/v1/messages/count_tokens", {"model": "demo", "messages": CHAT[1:]})

    async def go_wrong(self) -> None:
        """Every way to be refused, stopped or misunderstood, with a text that could be repeated."""
        good = {"model": "demo", "messages": CHAT, "max_tokens": 24}
        endless = good | {"max_tokens": 400, "ignore_eos": True}
        for path, body in (
            ("/v1/chat/completions", json.dumps(good)[:-5]),
            ("/v1/chat/completions", good | {"temperature": PLANTED}),
            ("/v1/chat/completions", good | {"model": PLANTED}),
            ("/v1/chat/completions", good | {"max_tokens": 10**8}),
            ("/v1/chat/completions", good | {"messages": [{"role": PLANTED, "content": STORY}]}),
            ("/v1/chat/completions", endless | {"deadline_ms": 12}),
            ("/v1/messages", {"model": "demo", "messages": PLANTED}),
            ("/v2/tasks", {"prompt": STORY, "tenant": PLANTED}),
            ("/v2/tasks", {"prompt": STORY, PLANTED: 1}),
            (f"/v1/{PLANTED}", good),
        ):
            status, text = await self.post(path, body)
            assert status >= 400, (path, text)
        status, _ = await self.post("/v1/chat/completions", good, Authorization=WRONG_KEY)
        assert status == 401
        odd = {"X-Deadline": PLANTED, "traceparent": PLANTED}
        status, _ = await self.post("/v1/chat/completions", good, **odd)
        assert status == 400
        streamed = json.dumps(endless | {"stream": True})
        async with self._session.post("/v1/chat/completions", data=streamed) as answer:
            await answer.content.readline()  # and it goes away
        status, text = await self.post("/v2/tasks", {"prompt": STORY, "max_tokens": 400})
        url = json.loads(text)["events_url"].removesuffix("/events")
        await self.post(url + "/cancel", {})


def windows(text: str) -> Iterator[str]:
    """All of a text that is long enough to be told from a log's own words."""
    for at in range(max(0, len(text) - WINDOW + 1)):
        yield text[at : at + WINDOW]


def test_or16_nothing_that_a_run_writes_has_a_prompt_a_text_or_a_secret(
    demo: Stack, receiver: tuple[str, list[bytes]]
) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="traces need tidegate[otel]")
    address, traces = receiver
    before = demo.triton.log.stat().st_size
    orchestrator = Orchestrator(
        demo.triton.grpc,
        token=KEY,
        telemetry__log_level="debug",
        telemetry__log_format="json",
        telemetry__otlp_endpoint=address,
    )
    orchestrator.log.unlink(missing_ok=True)

    async def run() -> tuple[Client, str]:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        async with aiohttp.ClientSession(orchestrator.url, headers=headers) as session:
            client = Client(session)
            await client.talk()
            with demo.slowed():  # what is to be stopped is not over before
                await client.go_wrong()
            openmetrics = {"Accept": "application/openmetrics-text"}
            async with session.get("/metrics", headers=openmetrics) as answer:
                return client, await answer.text()

    with running(orchestrator):
        client, metrics = asyncio.run(run())
        eventually(lambda: '"aborted"' in orchestrator.log.read_text(), "the client's end")
    assert len(client.texts) == 3 and all(client.texts) and client.ids
    with demo.triton.log.open("rb") as file:
        file.seek(before)
        triton = file.read().decode(errors="replace")
    written = {
        "the orchestrator's log": orchestrator.log.read_text(),
        "Triton's log": triton,
        "the metrics": metrics,
        "the traces": b"".join(traces).decode(errors="replace"),
    }
    # It has seen what it is to have seen: else nothing would be proven.
    for action in ("place", "answer", "refuse", "abort"):
        assert f'"action":"{action}"' in written["the orchestrator's log"]
    assert "text_completion demo" in written["the traces"]
    assert "tidegate_outcomes_total" in metrics
    secrets = {KEY, WRONG_KEY, *windows(PLANTED), *windows(STORY)}
    secrets |= {w for text in client.texts for w in windows(text)}
    secrets |= {json.dumps(w)[1:-1] for w in secrets}
    secrets |= {", ".join(map(str, client.ids[:4])), ",".join(map(str, client.ids[:4]))}
    found = [(where, s) for where, text in written.items() for s in secrets if s in text]
    assert not found, found[:10]
