"""The picker as a process, and with pods that are real or come and go."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from picker.ext_proc import FULL_DUPLEX_STREAMED
from picker.pods import Pods
from picker.section import PickerSection
from tests.orchestrator.conftest import MakeService, MakeWorker
from tests.picker.test_stream import Envoy, answer, named
from tests.support.cases import for_each
from tests.support.clock import ManualClock
from tests.support.pods import FakePod, serve_picker


async def test_a_real_orchestrator_as_a_pod(
    make_service: MakeService, make_worker: MakeWorker
) -> None:
    """Its load is read from the page made for pickers, its answers are understood."""
    service = await make_service(await make_worker())
    address = service.url.removeprefix("http://")
    async with serve_picker(address) as served:
        pod = served.pods.find(address)
        assert pod is not None and pod.page is not None and not pod.fault
        assert pod.page.models == {"fake"} and pod.page.kv_blocks > 0
        async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
            for stream in (True, False):
                asked = {"model": "fake", "prompt": "Hi", "max_tokens": 12, "stream": stream}
                asked |= {"stream_options": {"include_usage": True}} if stream else {}
                envoy = Envoy(channel, FULL_DUPLEX_STREAMED, FULL_DUPLEX_STREAMED)
                await envoy.head("/v1/completions")
                await envoy.body(json.dumps(asked).encode())
                assert named(await envoy.get("request_headers"), "request_headers") == [address]
                await envoy.get("request_body")
                async with service.http.post("/v1/completions", json=asked) as response:
                    body, kind = await response.read(), response.headers["Content-Type"]
                assert response.status == 200
                await answer(envoy, [body], kind)
                await envoy.hang_up()
    assert not pod.flights
    assert pod.prospect(0.0).pace is not None  # learnt from answers, which told their tokens


@pytest.mark.slow
async def test_the_command_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TIDEGATE_")}
    environment = kept | {
        "PYTHONPATH": f"{root}{os.pathsep}{root / 'client'}",
        "TIDEGATE_TELEMETRY__LOG_FORMAT": "json",
    }
    async with FakePod().serve() as pod:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tidegate", "picker"),
            *("--endpoints", pod.address, "--port", "0"),
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            cwd=tmp_path,
        )
        assert process.stderr is not None
        said: dict[str, dict[str, object]] = {}
        while not {"listening", "a pod reports its load"} <= said.keys():
            entry = json.loads(await process.stderr.readline())
            said[entry["message"]] = entry
        port = said["listening"]["port"]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            serving = health_pb2.HealthCheckResponse.SERVING
            async for told in stub.Watch(health_pb2.HealthCheckRequest()):
                if told.status == serving:
                    break
            envoy = Envoy(channel, FULL_DUPLEX_STREAMED, FULL_DUPLEX_STREAMED)
            await envoy.head("/v1/models", end=True)
            assert named(await envoy.get("request_headers"), "request_headers") == [pod.address]
            await envoy.hang_up()
        process.send_signal(signal.SIGTERM)
        rest = await process.stderr.read()
        assert await process.wait() == 0, rest


@for_each(
    ("change", "fault"),
    [
        ({"has_metrics": False}, "/metrics answers 404"),
        ({"metrics": {"num_requests_running": 1}}, "no vllm:num_requests_waiting"),
    ],
)
async def test_a_pod_that_tells_nothing_says_why(change: dict[str, object], fault: str) -> None:
    async with FakePod().serve() as pod:
        for name, value in change.items():
            setattr(pod, name, value)
        async with serve_picker(pod.address) as served:
            (one,) = served.pods
            assert fault in one.fault and one.is_reachable
            assert served.pods.is_ready  # failing open


async def test_a_pod_that_is_named_no_more_gets_nothing_and_may_come_back() -> None:
    pods = Pods(PickerSection(), ManualClock())
    for address in ("10.0.0.1:80", "10.0.0.2:80"):
        pods.add(address)
    pods.retire("10.0.0.1:80")
    assert [pod.address for pod in pods] == ["10.0.0.2:80"]
    assert pods.idle("10.0.0.1:80") and not pods.ready("10.0.0.1:80")
    pods.add("10.0.0.1:80")
    assert len(list(pods)) == 2
    await pods.remove("10.0.0.2:80")
    assert pods.addresses() == {"10.0.0.1:80": None}
