"""Servers that answer oddly: they cost their own jobs at most, and the memory of what was asked."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from orchestrator.lanes import Lane
from orchestrator.lanes.servers import completions
from orchestrator.lanes.servers.completions import ServerEvent, decoded
from orchestrator.lanes.servers.job import JobFailed
from orchestrator.lanes.servers.kinds import VllmLane
from orchestrator.lanes.servers.text import PromptText
from protocol import NO_TOKEN_ID, Code, FinishReason, Sampling
from tests.support.lanes import GREEDY, News, lane_to, submit
from tests.support.other_servers import (
    LETTER_IDS,
    Asked,
    HttpServer,
    LlamaCppServer,
    OtherServer,
    Script,
    TgiServer,
    VllmServer,
    model_folder,
)
from tests.support.plain_triton import PlainTriton, PlainTrtLlm

HTTP = [VllmServer, LlamaCppServer, TgiServer]


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    return await asyncio.to_thread(model_folder, tmp_path / "model")


@asynccontextmanager
async def served(server: OtherServer, folder: Path) -> AsyncIterator[tuple[Lane, News]]:
    await server.start()
    try:
        async with lane_to(server.entry(folder)) as (lane, news):
            yield lane, news
    finally:
        await server.stop()


async def run(lane: Lane, sampling: Sampling = GREEDY, budget_ms: float = 60_000.0) -> News:
    job = News()
    submit(lane, job, sampling, budget_ms=budget_ms)
    await job.until(lambda: job.is_over)
    return job


@pytest.mark.parametrize("error", ["1e999", '{"message": 1e999}', "[" * 900 + "]" * 900])
def test_an_error_that_cannot_be_read_is_told_as_it_came(error: str) -> None:
    event = f'{{"error": {error}}}'.encode()
    with pytest.raises(JobFailed) as failed:
        decoded(msgspec.json.Decoder(ServerEvent), event)
    assert failed.value.code is Code.ENGINE_ERROR
    assert error[:20] in str(failed.value)


def in_two_parts(kind: type[HttpServer]) -> HttpServer:
    class InParts(kind):  # type: ignore[misc,valid-type]
        def _telling(self, answer: Callable[[], object]) -> Callable[[web.Request], Any]:
            whole = super()._telling(answer)

            async def handle(request: web.Request) -> web.StreamResponse:
                body = (await whole(request)).body
                response = web.StreamResponse()
                response.content_length = len(body)
                await response.prepare(request)
                for part in (body[: len(body) // 2], body[len(body) // 2 :]):
                    await response.write(part)
                    await asyncio.sleep(0.01)
                return response

            return handle

    return InParts()


@pytest.mark.parametrize("kind", HTTP)
async def test_what_a_server_tells_may_come_in_parts(kind: type[HttpServer], folder: Path) -> None:
    async with served(in_two_parts(kind), folder) as (lane, news):
        assert news.card is not None and news.card.model == "other"
        assert (await run(lane)).text == "abcdef"


@pytest.mark.parametrize("kind", HTTP)
async def test_a_server_of_another_kind_is_said_to_be_one(
    kind: type[HttpServer], folder: Path
) -> None:
    class Pages(kind):  # type: ignore[misc,valid-type]
        is_site = True

        def _telling(self, answer: Callable[[], object]) -> Callable[[web.Request], Any]:
            real = super()._telling(answer)

            async def handle(request: web.Request) -> web.Response:
                if self.is_site:
                    return web.Response(text="<html>It works!</html>", content_type="text/html")
                told: web.Response = await real(request)
                return told

            return handle

    server = Pages()
    await server.start()
    async with lane_to(server.entry(folder), opens=False) as (lane, news):
        await news.until(lambda: bool(news.closed))
        server.is_site = False
        await news.until(lambda: lane.is_open)
        assert all("no JSON object" in reason for reason in news.closed)
    await server.stop()


async def test_figures_that_are_none_are_not_believed(folder: Path) -> None:
    class Nonsense(LlamaCppServer):
        def _told(self) -> dict[str, Callable[[], object]]:
            told = super()._told()
            props = {"total_slots": -3, "default_generation_settings": {"n_ctx": 10**30}}
            more = {"/props": lambda: told["/props"]() | props, "/slots": lambda: {"error": "no"}}  # type: ignore[operator]
            return told | more

    async with served(Nonsense(), folder) as (lane, news):
        assert news.card is not None
        assert (news.card.max_running, news.card.context_tokens) == (1, 512)
        frames = lane.frames_total
        await news.until(lambda: lane.frames_total > frames + 1)
        assert news.opened == 1, "a look at its slots that fails is no end"


async def test_no_redirect_is_followed(folder: Path) -> None:
    """It would take the prompt to a host that nobody named."""
    elsewhere, server = VllmServer(), VllmServer()

    async def away(request: web.Request) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect(f"http://127.0.0.1:{elsewhere.port}{request.path}")

    server._generate = away  # type: ignore[method-assign]
    await elsewhere.start()
    async with served(server, folder) as (lane, _):
        job = await run(lane)
        assert job.end.code is Code.ENGINE_ERROR and "307" in job.end.message
    await elsewhere.stop()
    assert not elsewhere.asked


@pytest.mark.parametrize("kind", HTTP)
async def test_a_server_that_goes_on_beyond_what_was_asked_for_is_left(
    kind: type[HttpServer], folder: Path
) -> None:
    class Chatty(kind):  # type: ignore[misc,valid-type]
        def _limit(self, body: dict[str, Any]) -> int:
            return 100

    server = Chatty()
    server.plan = lambda body: Script(stall_at=7)
    async with served(server, folder) as (lane, _):
        job = await run(lane)
        assert (job.text, job.ids) == ("abcdef", LETTER_IDS[:6])
        assert (job.end.reason, job.end.code) == (FinishReason.LENGTH, None)
        await server.until(lambda: server.running == 0)


async def test_a_count_of_tokens_is_bounded_by_what_was_asked_for(folder: Path) -> None:
    class Miscounting(LlamaCppServer):
        def _events(self, asked: Asked, at: int, total: int) -> list[object]:
            events = super()._events(asked, at, total)
            return [event | {"tokens_predicted": 10**15} for event in events]  # type: ignore[operator]

    async with served(Miscounting(), folder) as (lane, _):
        job = await run(lane)
        assert len(job.ids) == job.end.completion_tokens == 6

    class Old(VllmServer):
        version = "0.9.0"

        def _events(self, asked: Asked, at: int, total: int) -> list[object]:
            events = super()._events(asked, at, total)
            for event in events:
                if isinstance(event, dict):
                    event["usage"] = {"completion_tokens": 10**15}
            return events

    async with served(Old(), folder) as (lane, _):
        job = await run(lane)
        assert job.ids == [NO_TOKEN_ID] * 6
        assert job.text == "abcdef"


@pytest.mark.parametrize("token", [-7, 2**40])
async def test_an_id_that_no_vocabulary_has_fails_the_job(folder: Path, token: int) -> None:
    class Wild(VllmServer):
        def _events(self, asked: Asked, at: int, total: int) -> list[object]:
            events = super()._events(asked, at, total)
            events[0]["choices"][0]["token_ids"] = [token]  # type: ignore[index]
            return events

    async with served(Wild(), folder) as (lane, _):
        job = await run(lane)
        assert job.end.code is Code.ENGINE_ERROR and "token id" in job.end.message
        assert job.ids == []


async def test_text_that_comes_of_no_tokens_is_not_kept_for_ever(folder: Path) -> None:
    class Talking(LlamaCppServer):
        def _limit(self, body: dict[str, Any]) -> int:
            return 100

        def _events(self, asked: Asked, at: int, total: int) -> list[object]:
            return [{"content": "x" * 1000, "tokens": [], "stop": False}]

    async with served(Talking(), folder) as (lane, _):
        job = await run(lane)
        assert job.end.code is Code.ENGINE_ERROR and "without any tokens" in job.end.message


class NeverDone(VllmServer):
    """Tells how the text ended, and never that this was all."""

    def _events(self, asked: Asked, at: int, total: int) -> list[object]:
        return super()._events(asked, at, total)[:1]

    async def _stream(
        self, asked: Asked, response: web.StreamResponse, request: web.Request
    ) -> None:
        await super()._stream(asked, response, request)
        await asyncio.Event().wait()


async def test_a_text_that_is_whole_waits_only_a_moment_for_what_is_said_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "USAGE_S", 0.01)
    server = NeverDone()
    async with served(server, folder) as (lane, _):
        job = await run(lane)
        assert (job.text, job.end.reason, job.end.code) == ("abcdef", FinishReason.LENGTH, None)
        await server.until(lambda: server.running == 0)


async def test_a_text_that_is_whole_misses_no_deadline_by_what_is_said_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "USAGE_S", 60.0)
    async with served(NeverDone(), folder) as (lane, _):
        assert isinstance(lane, VllmLane)
        job = News()
        submit(lane, job)
        (one,) = lane._jobs.values()
        await job.until(lambda: one.finish is not None)
        one.ends_at = 0.0
        lane._deadline_passed(one)
        assert (job.text, job.end.reason, job.end.code) == ("abcdef", FinishReason.LENGTH, None)


async def test_a_request_that_a_library_cancels_is_lost_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC's calls do so when their channel breaks in certain ways."""

    async def cancelled(lane: VllmLane, job: object, prompt: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(VllmLane, "_generate", cancelled)
    async with served(VllmServer(), folder) as (lane, _):
        job = await run(lane)
        assert "cancelled" in job.lost[0]
        assert lane.load == 0


async def test_a_long_text_without_counts_is_not_counted_from_its_beginning_each_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest, real = 0, PromptText.count

    def count(self: PromptText, text: str) -> int:
        nonlocal longest
        longest = max(longest, len(text))
        return real(self, text)

    monkeypatch.setattr(PromptText, "count", count)
    server = PlainTrtLlm()
    server.plan = lambda body: Script()
    async with served(server, folder) as (lane, _):
        job = await run(lane, Sampling(max_tokens=700, temperature=0.0))
        assert job.end.completion_tokens == len(job.text) == 700
        assert longest < 300


async def test_a_key_file_must_hold_a_key(folder: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    await asyncio.to_thread(key.write_text, "two\nlines")
    server = VllmServer()
    await server.start()
    async with lane_to(server.entry(folder, key_file=key), opens=False) as (lane, news):
        await news.until(lambda: bool(news.closed))
        await asyncio.to_thread(key.write_text, "one-key\n")
        await news.until(lambda: lane.is_open)
        assert "one key" in news.closed[0]
        assert "lines" not in news.closed[0] and str(key) not in news.closed[0]
    await server.stop()


async def test_a_connection_that_is_half_open_is_not_the_next_one(folder: Path) -> None:
    """A channel would keep it until the kernel gives it up, a quarter of an hour later."""
    server = PlainTriton()
    await server.start()
    stuck, ends = asyncio.Event(), set[asyncio.StreamWriter]()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", server.port)
        ends.update((writer, there_writer))
        is_old = not stuck.is_set()

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                if not (is_old and stuck.is_set()):
                    sink.write(data)

        await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer))

    proxy = await asyncio.start_server(forward, "127.0.0.1", 0)
    port = proxy.sockets[0].getsockname()[1]
    entry = server.entry(folder).replace(str(server.port), str(port))
    async with lane_to(entry) as (lane, news):
        stuck.set()
        lane.break_off("no heartbeat")  # as its owner does
        await news.until(lambda: news.opened == 2)
        assert (await run(lane)).text == "abcdef"
    proxy.close()
    for writer in ends:
        writer.close()
    await server.stop()
