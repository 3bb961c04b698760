"""The mock that other kinds of servers are measured with: lanes take it for the real ones."""

from pathlib import Path

import aiohttp
import pytest

from perf.stack.other_servers import LaneConnection
from perf.stack.stream_server import serve
from protocol import AbortCause, FinishReason, Sampling
from tests.support.lanes import News, lane_to, submit
from tests.support.other_servers import model_folder


@pytest.mark.parametrize("kind", ["vllm", "llamacpp", "tgi"])
async def test_a_lane_reads_its_tokens_and_a_cancel_is_noted(kind: str, tmp_path: Path) -> None:
    server = await serve(0, 1.0, LaneConnection)
    port = server.sockets[0].getsockname()[1]
    folder = model_folder(tmp_path / "model")
    async with lane_to(f"{kind}+http://127.0.0.1:{port}?tokenizer={folder}") as (lane, _):
        job, given_up = News(), News()
        submit(lane, job, Sampling(max_tokens=5, temperature=0.0))
        await job.until(lambda: job.is_over)
        assert job.text == 5 * " tide"
        assert job.end.reason is FinishReason.LENGTH
        handle = submit(lane, given_up, Sampling(max_tokens=100_000, temperature=0.0))
        await given_up.until(lambda: len(given_up.ids) > 3)
        lane.cancel(handle, AbortCause.DISCONNECT)
        stops: list[float] = []
        async with aiohttp.ClientSession() as http:
            while not stops:
                async with http.get(f"http://127.0.0.1:{port}/stops") as response:
                    stops = await response.json()
        assert len(stops) == 1
    server.close()
    await server.wait_closed()
