"""What holds for lanes to servers of every other kind: one suite over a table of kinds."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web

from orchestrator.lanes import Lane, ServerKind, kind_of
from orchestrator.lanes.servers import lane as server_lane
from orchestrator.lanes.servers.kinds import VllmLane
from protocol import NO_TOKEN_ID, AbortCause, Code, Feature, FinishReason, OnDeadline, Sampling
from tests.support.cases import for_each
from tests.support.lanes import GREEDY, News, lane_to, submit
from tests.support.other_servers import (
    LETTER_IDS,
    LETTERS,
    LlamaCppServer,
    OtherServer,
    Script,
    TgiServer,
    VllmServer,
    model_folder,
)
from tests.support.steady_loop import hurry


class OldVllm(VllmServer):
    """A version that tells no token ids."""

    version = "0.9.2"


class AnyServer(VllmServer):
    """One that has OpenAI's completions and models, refuses what OpenAI has not, and tells nvllm
    ids nor counts."""

    kind = "openai"

    def _told(self) -> dict[str, Callable[[], object]]:
        return {"/v1/models": super()._told()["/v1/models"]}

    def _limit(self, body: dict[str, Any]) -> int:
        own = {"model", "prompt", "max_tokens", "temperature", "top_p", "stop", "seed", "stream"}
        assert isinstance(body["prompt"], list) and body.keys() <= own, body
        return super()._limit(body)


class Kind(NamedTuple):
    """A kind of server, and what it can do."""

    server: type[OtherServer]
    names_ids: bool = False
    takes_ids: bool = False
    """It takes and gives all ids."""
    has_logprobs: bool = False
    leaves_stops: bool = False
    sees_end: bool = True
    """An end token counts; one that counts by the text alone cannot see it."""


KINDS = {
    "vllm": Kind(VllmServer, names_ids=True, takes_ids=True, has_logprobs=True),
    "vllm-old": Kind(OldVllm),
    "llamacpp": Kind(LlamaCppServer, names_ids=True),
    "tgi": Kind(TgiServer, names_ids=True, has_logprobs=True, leaves_stops=True),
    "openai": Kind(AnyServer, leaves_stops=True, sees_end=False),
}
HTTP = [VllmServer, LlamaCppServer, TgiServer]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
async def server(kind: Kind) -> AsyncIterator[OtherServer]:
    made = kind.server()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def vllm() -> AsyncIterator[VllmServer]:
    """For what a lane does whatever the API."""
    made = VllmServer()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    return await asyncio.to_thread(model_folder, tmp_path / "model")


@asynccontextmanager
async def served(
    server: OtherServer, folder: Path, script: Script | None = None, **more: object
) -> AsyncIterator[tuple[Lane, News]]:
    server.plan = lambda body: script or Script()
    await server.start()
    try:
        async with lane_to(server.entry(folder, **more)) as (lane, news):
            yield lane, news
    finally:
        await server.stop()


async def run(lane: Lane, sampling: Sampling = GREEDY, **more: Any) -> News:
    job = News()
    submit(lane, job, sampling, **more)
    await job.until(lambda: job.is_over)
    return job


# ── every kind ───────────────────────────────────────────────────────────────────────────────────


async def test_a_text_comes_with_its_tokens_counted(
    kind: Kind, server: OtherServer, folder: Path
) -> None:
    async with lane_to(server.entry(folder)) as (lane, news):
        assert news.card is not None
        assert (news.card.model, news.card.vocab_size) == ("other", 262)
        assert kind_of(server.entry(folder)) is ServerKind(server.kind)
        job = await run(lane)
        assert (job.text, job.end.code, job.end.reason) == ("abcdef", None, FinishReason.LENGTH)
        assert (job.end.completion_tokens, len(job.ids), job.started) == (6, 6, 1)
        assert job.ids == (LETTER_IDS[:6] if kind.names_ids else [NO_TOKEN_ID] * 6)
        assert lane.load == 0
        await news.until(lambda: news.stats is not None and news.stats.tokens_total == 6)
        server.plan = lambda body: Script(tokens=3)
        job = await run(lane)
        assert (job.text, job.end.reason) == ("abc", FinishReason.STOP)
        assert job.end.completion_tokens == 3 + kind.sees_end


async def test_a_lane_opens_with_each_fact_asked_for_once(
    server: OtherServer, folder: Path
) -> None:
    async with lane_to(server.entry(folder)):
        assert server.told and set(server.told.values()) == {1}


async def test_a_request_is_in_the_servers_own_words(server: OtherServer, folder: Path) -> None:
    sampling = Sampling(max_tokens=4, temperature=0.5, top_p=0.9, top_k=7, seed=11, stop=("zz",))
    async with lane_to(server.entry(folder)) as (lane, _):
        await run(lane, sampling)
    (asked,) = server.asked
    prompt = asked.body.get("prompt") or asked.body["inputs"]
    ids = [0, *(LETTER_IDS[LETTERS.index(letter)] for letter in "hello")]
    assert prompt == (ids if isinstance(prompt, list) else "<|bos|>hello")
    said = asked.body.get("parameters", asked.body)
    limit = said.get("max_tokens", said.get("n_predict", said.get("max_new_tokens")))
    assert (limit, said["seed"], said["stop"], said["top_k"]) == (4, 11, ["zz"], 7)
    assert (said["temperature"], said["top_p"]) == pytest.approx((0.5, 0.9))
    if isinstance(server, LlamaCppServer):
        assert 0 < asked.body["t_max_predict_ms"] <= 60_000


async def test_logprobs_are_those_of_the_tokens(
    kind: Kind, server: OtherServer, folder: Path
) -> None:
    if not kind.has_logprobs:
        pytest.skip("this server has none, or none with ids")
    async with lane_to(server.entry(folder)) as (lane, _):
        job = await run(lane, Sampling(max_tokens=3, temperature=0.0, logprobs=2))
        assert [entry.logprob for entry in job.logprobs] == [-0.5] * 3
        assert all([i for i, _ in entry.top] == [2, 3] for entry in job.logprobs)


async def test_a_cancel_stops_the_server(server: OtherServer, folder: Path) -> None:
    server.plan = lambda body: Script(step_s=0.002)
    async with lane_to(server.entry(folder, abort_ms=150)) as (lane, _):
        job = News()
        handle = submit(lane, job, Sampling(max_tokens=200, temperature=0.0))
        await job.until(lambda: len(job.ids) > 2)
        lane.cancel(handle, AbortCause.CANCEL)
        lane.cancel(handle, AbortCause.CANCEL)
        await job.until(lambda: job.is_over)
        assert (job.end.reason, job.end.code) == (FinishReason.CANCELLED, Code.CANCELLED)
        assert lane.load == 1, "for as long as an abort takes"
        await server.until(lambda: server.running == 0)
        assert server.asked[0].is_aborted
        await job.until(lambda: lane.load == 0)


async def test_a_job_ends_at_its_deadline_whatever_the_server_says(
    vllm: VllmServer, folder: Path
) -> None:
    vllm.plan = lambda body: Script(stall_at=2)
    async with lane_to(vllm.entry(folder, abort_ms=0)) as (lane, _):
        job, cut = News(), News()
        submit(lane, job, budget_ms=300.0)
        submit(lane, cut, budget_ms=300.0, on_deadline=OnDeadline.PARTIAL)
        await job.until(lambda: job.is_over and cut.is_over)
        assert job.text == cut.text == "ab"
        assert (job.end.reason, job.end.code) == (FinishReason.DEADLINE, Code.DEADLINE_EXCEEDED)
        assert "after 2 tokens" in job.end.message
        assert (cut.end.reason, cut.end.code) == (FinishReason.DEADLINE, None)
        assert job.end.left_ms <= 0
        await vllm.until(lambda: vllm.running == 0)


async def test_a_connection_that_breaks_loses_its_job_and_no_other(
    vllm: VllmServer, folder: Path
) -> None:
    def plan(body: dict[str, object]) -> Script:
        return Script(cut_at=2) if len(vllm.asked) == 0 else Script(step_s=0.01)

    vllm.plan = plan
    async with lane_to(vllm.entry(folder)) as (lane, news):
        broken, other = News(), News()
        submit(lane, broken)
        await vllm.until(lambda: len(vllm.asked) == 1)
        submit(lane, other)
        await other.until(lambda: broken.is_over and other.is_over)
        assert (len(broken.lost), broken.ends, broken.text) == (1, [], "ab")
        assert other.text == "abcdef"
        assert news.opened == 1


@for_each(
    ("script", "code", "said"),
    [
        (Script(ends_early=True), None, "its answer ended early"),
        (Script(fail_at=3), Code.ENGINE_ERROR, "the engine failed"),
        (Script(status=400), Code.INVALID_REQUEST, "not now"),
        (Script(status=500), Code.ENGINE_ERROR, "not now"),
    ],
)
async def test_a_failure_says_what_it_is(
    server: OtherServer, folder: Path, script: Script, code: Code | None, said: str
) -> None:
    server.plan = lambda body: script
    async with lane_to(server.entry(folder)) as (lane, _):
        job = await run(lane)
        if code is None:
            assert not job.ends and said in job.lost[0]
        else:
            assert (job.end.reason, job.end.code) == (FinishReason.ERROR, code)
            assert said in job.end.message


async def test_stop_strings_end_the_text_before_them(
    kind: Kind, server: OtherServer, folder: Path
) -> None:
    if not kind.leaves_stops:
        pytest.skip("this server leaves stop strings out itself")
    async with lane_to(server.entry(folder)) as (lane, _):
        job = await run(lane, Sampling(max_tokens=9, temperature=0.0, stop=("de", "x")))
        assert (job.text, job.end.stop, job.end.reason) == ("abc", "de", FinishReason.STOP)
        assert job.end.completion_tokens == 5
        unfinished = await run(lane, Sampling(max_tokens=4, temperature=0.0, stop=("de",)))
        assert unfinished.text == "abcd"


async def test_a_server_that_goes_loses_all_jobs_and_is_found_again(
    vllm: VllmServer, folder: Path
) -> None:
    vllm.plan = lambda body: Script(stall_at=1)
    async with lane_to(vllm.entry(folder)) as (lane, news):
        jobs = [News(), News()]
        for job in jobs:
            submit(lane, job)
        await jobs[0].until(lambda: all(job.ids for job in jobs))
        await vllm.stop()
        await jobs[0].until(lambda: all(job.is_over for job in jobs))
        assert all(len(job.lost) == 1 and not job.ends for job in jobs)
        await news.until(lambda: not lane.is_open)
        assert news.closed
        vllm.plan = lambda body: Script()
        await vllm.start()
        await news.until(lambda: lane.is_open)
        assert (await run(lane)).text == "abcdef"
        vllm.is_unhealthy = True
        await news.until(lambda: not lane.is_open)
        vllm.is_unhealthy = False
        await news.until(lambda: lane.is_open)
        assert news.opened == 3


async def test_a_silent_server_is_silence_and_no_end(vllm: VllmServer, folder: Path) -> None:
    """Whether silence counts is its owner's to say (OR-6)."""
    async with lane_to(vllm.entry(folder)) as (lane, news):
        vllm.is_silent = True
        seen = lane.last_frame_at
        hurry(5)
        await asyncio.sleep(0.7)
        assert lane.is_open
        assert lane.last_frame_at - seen < 0.5
        hurry(1)
        assert (await run(lane)).text == "abcdef"
        lane.break_off("a test")
        await news.until(lambda: bool(news.closed))
        assert news.closed[0] == "a test"


async def test_its_pace_is_seen_from_outside(vllm: VllmServer, folder: Path) -> None:
    vllm.plan = lambda body: Script(step_s=0.01)
    async with lane_to(vllm.entry(folder)) as (lane, news):
        await run(lane, Sampling(max_tokens=20, temperature=0.0))
        await news.until(lambda: news.stats is not None and news.stats.tokens_total == 20)
        assert news.stats is not None
        assert 10 <= news.stats.steps_total <= 20
        assert news.stats.busy_ms_total >= 10 * news.stats.steps_total * 0.5


async def test_the_card_says_what_the_server_cannot(
    kind: Kind, server: OtherServer, folder: Path
) -> None:
    more = {"slots": 3, "context": 128, "alias": "mine", "name": "n1"}
    job = News()
    server.plan = lambda body: Script(stall_at=1)
    async with lane_to(server.entry(folder, **more)) as (lane, news):
        card = news.card
        assert card is not None
        assert lane.address == "n1"
        assert (card.model, card.max_running, card.context_tokens) == ("mine", 3, 128)
        assert list(card.lacks) == sorted(card.lacks)
        assert {Feature.GRAMMAR, Feature.KV_EVENTS, Feature.STEP_ABORT} <= set(card.lacks)
        assert (Feature.TOKEN_IDS in card.lacks) is not kind.takes_ids
        is_vllm = server.kind == "vllm"
        assert (Feature.LOGPROBS in card.lacks) is not (kind.has_logprobs or is_vllm)
        assert card.abort_ms > 0
        assert not (card.can_pause or card.can_continue)
        submit(lane, job)
        await job.until(lambda: len(job.ids) == 1)
    assert len(job.lost) == 1, "with its lane"
    await server.until(lambda: server.running == 0)


# ── those over HTTP ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", HTTP)
async def test_answers_may_come_in_any_pieces(folder: Path, kind: type[VllmServer]) -> None:
    server = kind()
    server.in_parts = True
    async with served(server, folder, Script(tokens=3, slices=3)) as (lane, news):
        assert news.card is not None and news.card.model == "other"
        assert (await run(lane)).text == "abc"


@pytest.mark.parametrize("kind", HTTP)
async def test_a_server_of_another_kind_is_said_to_be_one(
    kind: type[VllmServer], folder: Path
) -> None:
    server = kind()
    server.is_site = True
    await server.start()
    async with lane_to(server.entry(folder), opens=False) as (lane, news):
        await news.until(lambda: bool(news.closed))
        server.is_site = False
        await news.until(lambda: lane.is_open)
        assert all("no JSON object" in reason for reason in news.closed)
    await server.stop()


def _with_id(token: int) -> Callable[[list[Any]], list[Any]]:
    def altered(events: list[Any]) -> list[Any]:
        events[0]["choices"][0]["token_ids"] = [token]
        return events

    return altered


@pytest.mark.parametrize(
    ("kind", "script", "text", "code", "said"),
    [
        *((one, Script(limit=100, stall_at=7), "abcdef", None, "") for one in HTTP),
        *(
            (VllmServer, Script(alter=_with_id(token)), "", Code.ENGINE_ERROR, "token id")
            for token in (-7, 2**40)
        ),
        (
            LlamaCppServer,
            Script(limit=100, alter=lambda events: [{"content": "x" * 1000, "tokens": []}]),
            "",
            Code.ENGINE_ERROR,
            "without any tokens",
        ),
    ],
)
async def test_what_makes_no_sense_costs_its_job_at_most(
    kind: type[VllmServer], script: Script, text: str, code: Code | None, said: str, folder: Path
) -> None:
    """A server that continues beyond what was asked for is left, a count is bounded by it."""
    server = kind()
    async with served(server, folder, script) as (lane, _):
        job = await run(lane)
        assert job.text == text
        assert (job.end.code, len(job.ids)) == (code, 0 if code else 6)
        assert said in job.end.message
        await server.until(lambda: server.running == 0)


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


async def test_a_key_is_sent_from_its_file(folder: Path, tmp_path: Path) -> None:
    key, server = tmp_path / "key", VllmServer()
    await asyncio.to_thread(key.write_text, "two\nlines")
    await server.start()
    async with lane_to(server.entry(folder, key_file=key), opens=False) as (lane, news):
        await news.until(lambda: bool(news.closed))
        await asyncio.to_thread(key.write_text, "s3cret\n")
        await news.until(lambda: lane.is_open)
        assert "one key" in news.closed[0]
        assert "lines" not in news.closed[0] and str(key) not in news.closed[0]
        await run(lane)
        headers = server.asked[0].headers
        assert (headers["authorization"], headers["x-request-id"]) == ("Bearer s3cret", "corr-1")
    await server.stop()


# ── one kind ─────────────────────────────────────────────────────────────────────────────────────


async def test_or24_a_server_that_can_keeps_tenants_prefixes_apart(folder: Path) -> None:
    server = VllmServer()
    async with served(server, folder) as (lane, _):
        for salt in ("", "acme"):
            await run(lane, cache_salt=salt)
        assert [asked.body.get("cache_salt") for asked in server.asked] == [None, "acme"]


NEVER_DONE = Script(alter=lambda events: events[:1], stays_open=True)
"""Tells how the text ended, and never that this was all."""


@pytest.mark.parametrize("usage_s", [0.01, 60.0], ids=["waits a moment", "misses no deadline"])
async def test_a_text_that_is_whole_waits_for_what_is_said_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, usage_s: float
) -> None:
    monkeypatch.setattr(server_lane, "USAGE_S", usage_s)
    server, job = VllmServer(), News()
    async with served(server, folder, NEVER_DONE) as (lane, _):
        assert isinstance(lane, VllmLane)
        submit(lane, job)
        (one,) = lane._jobs.values()
        await job.until(lambda: one.finish is not None)
        if usage_s > 1:
            one.ends_at = 0.0
            lane._deadline_passed(one)
        await job.until(lambda: job.is_over)
        assert (job.text, job.end.reason, job.end.code) == ("abcdef", FinishReason.LENGTH, None)
        await server.until(lambda: server.running == 0)
