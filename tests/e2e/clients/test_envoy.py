"""The endpoint picker behind a real Envoy, in front of fake pods.

``make test-clients`` installs Envoy; elsewhere this is skipped.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from perf.stack import envoy
from pool.process.ports import free_ports
from tests.support.pods import FakePod, ServedPicker, serve_picker

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(envoy.BINARY is None, reason="make test-clients installs Envoy"),
]
CHAT = "/v1/chat/completions"
READY_S = 20


@dataclass
class Gateway:
    """Envoy with a busy pod, an idle one, and one that takes no connection."""

    url: str
    busy: FakePod
    idle: FakePod
    served: ServedPicker
    http: aiohttp.ClientSession

    async def ask(
        self, path: str = CHAT, headers: dict[str, str] | None = None, **body: Any
    ) -> tuple[int, Mapping[str, str], bytes]:
        asked = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **body}
        async with self.http.post(f"{self.url}{path}", json=asked, headers=headers) as response:
            return response.status, response.headers, await response.read()


@asynccontextmanager
async def gateway(folder: Path, mode: str, **picker: Any) -> AsyncIterator[Gateway]:
    async with AsyncExitStack() as stack:
        busy = await stack.enter_async_context(FakePod(num_requests_running=40).serve())
        idle = await stack.enter_async_context(FakePod().serve())
        for pod in (busy, idle):
            pod.metrics |= {"iteration_tokens_total_count": 0, "generation_tokens_total": 0}
            pod.metrics |= {"inter_token_latency_seconds_sum": 0}
            pod.metrics |= {"inter_token_latency_seconds_count": 0}
        served = await stack.enter_async_context(
            serve_picker(busy.address, idle.address, picker=picker)
        )
        for _ in range(2):
            for pod in (busy, idle):  # steps of 10 ms
                pod.metrics["iteration_tokens_total_count"] += 100
                pod.metrics["generation_tokens_total"] += 100
                pod.metrics["inter_token_latency_seconds_sum"] += 1.0
                pod.metrics["inter_token_latency_seconds_count"] += 100
            await served.poll()
        listen, admin = free_ports(2)
        config = envoy.configuration(listen, admin, served.port, [busy.port, idle.port], mode)
        process = envoy.start(folder, config)
        try:
            http = await stack.enter_async_context(aiohttp.ClientSession())
            await _ready(http, admin, folder)
            yield Gateway(f"http://127.0.0.1:{listen}", busy, idle, served, http)
            assert not any(pod.flights for pod in served.pods)
            await _no_complaint(http, admin)
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait, 10)


async def _ready(http: aiohttp.ClientSession, admin: int, folder: Path) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        try:
            async with http.get(f"http://127.0.0.1:{admin}/ready") as response:
                if response.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.1)
    raise AssertionError((folder / "envoy.log").read_text())


async def _no_complaint(http: aiohttp.ClientSession, admin: int) -> None:
    """Envoy counts what a processor says out of turn, or may not say."""
    async with http.get(f"http://127.0.0.1:{admin}/stats?filter=ext_proc&format=json") as response:
        stats = {one["name"]: one.get("value", 0) for one in (await response.json())["stats"]}
    counts = {name.rpartition(".")[2]: value for name, value in stats.items()}
    assert counts["streams_started"] > 0 and counts["stream_msgs_received"] > 0
    for name in ("spurious_msgs_received", "streams_failed", "rejected_header_mutations"):
        assert counts[name] == 0, counts
    for name in ("message_timeouts", "failure_mode_allowed", "http_not_ok_resp_received"):
        assert counts.get(name, 0) == 0, counts


@pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "BUFFERED", "STREAMED", "NONE"])
async def test_a_request_gets_to_the_pod_that_was_picked(tmp_path: Path, mode: str) -> None:
    """In every mode of the body, whole and with all of its answer; a body of many chunks too."""
    async with gateway(tmp_path, mode) as one:
        for stream in (False, True):
            status, _, answer = await one.ask(stream=stream, max_tokens=8)
            assert status == 200
            assert b"[DONE]" in answer if stream else json.loads(answer)["usage"]
        long = "word " * 100_000
        status, _, _ = await one.ask(messages=[{"role": "user", "content": long}])
        assert status == 200
        assert json.loads(one.idle.bodies[-1])["messages"][0]["content"] == long
        async with one.http.get(f"{one.url}/v1/models") as response:
            assert response.status == 200
        assert len(one.idle.headers) == 4 and not one.busy.headers
        # The header names the pod, and one to fall back on.
        named = one.idle.headers[0]["x-gateway-destination-endpoint"]
        assert named == f"{one.idle.address},{one.busy.address}"


async def test_a_deadline_that_is_certain_to_be_missed_is_refused(tmp_path: Path) -> None:
    """Envoy answers as Tidegate would, and no pod hears of it."""
    async with gateway(tmp_path, "FULL_DUPLEX_STREAMED") as one:
        status, headers, body = await one.ask(
            headers={"X-Timeout-Ms": "300"}, max_tokens=1000, ignore_eos=True
        )
        assert status == 504, body
        assert json.loads(body)["error"]["code"] == "deadline_infeasible"
        assert headers["x-should-retry"] == "false"
        assert headers["Content-Type"].startswith("application/json")
        status, headers, body = await one.ask(
            path="/v1/messages", headers={"X-Timeout-Ms": "1"}, max_tokens=5
        )
        assert status == 504 and json.loads(body)["type"] == "error"
        # What the gateway itself waits for counts as well, where it tells its picker.
        status, headers, _ = await one.ask(max_tokens=10_000, ignore_eos=True)
        assert status == 504 and headers["X-Deadline-Source"] == "x-request-timeout"
        assert not one.idle.headers and not one.busy.headers


async def test_a_pod_that_fails_is_stood_in_for_by_the_next_one(tmp_path: Path) -> None:
    async with gateway(tmp_path, "FULL_DUPLEX_STREAMED") as one:
        one.idle.status = 503
        status, _, _ = await one.ask(max_tokens=8)
        assert status == 200
        assert len(one.idle.headers) == 1 and len(one.busy.headers) == 1


async def test_a_client_that_hangs_up_counts_for_nobody(tmp_path: Path) -> None:
    """In the middle of its answer: Envoy ends the stream, and the pod's load falls."""
    async with gateway(tmp_path, "FULL_DUPLEX_STREAMED") as one:
        one.idle.may_end.clear()
        asked = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        async with one.http.post(f"{one.url}{CHAT}", json=asked) as response:
            assert await response.content.readline()
            assert sum(len(pod.flights) for pod in one.served.pods) == 1
            response.close()
        async with asyncio.timeout(10):
            while any(pod.flights for pod in one.served.pods):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
        one.idle.may_end.set()
