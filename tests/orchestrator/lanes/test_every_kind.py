"""What holds for lanes of every kind: one suite over Tidegate's own and the servers of others."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from orchestrator.lanes import Lane, ServerKind, kind_of
from protocol import (
    NO_TOKEN_ID,
    AbortCause,
    Code,
    Feature,
    FinishReason,
    OnDeadline,
    Sampling,
)
from tests.support.lanes import GREEDY, News, lane_to, submit
from tests.support.other_servers import (
    LETTER_IDS,
    LETTERS,
    Asked,
    LlamaCppServer,
    OtherServer,
    Script,
    TgiServer,
    VllmServer,
    model_folder,
)
from tests.support.plain_triton import PlainTriton, PlainTrtLlm
from tests.support.steady_loop import hurry


class OldVllm(VllmServer):
    """A version that tells no token ids."""

    version = "0.9.2"


KINDS = {
    "vllm": VllmServer,
    "vllm-old": OldVllm,
    "llamacpp": LlamaCppServer,
    "tgi": TgiServer,
    "triton-vllm": PlainTriton,
    "triton-trtllm": PlainTrtLlm,
}
NAMES_IDS = ("vllm", "llamacpp", "tgi")
WITH_LOGPROBS = ("vllm", "tgi")
LEAVES_STOPS = ("tgi", "triton-trtllm")


@pytest.fixture(params=KINDS)
async def server(request: pytest.FixtureRequest) -> AsyncIterator[OtherServer]:
    made = KINDS[request.param]()
    made.label = request.param  # type: ignore[attr-defined]
    await made.start()
    yield made
    await made.stop()


def label(server: OtherServer) -> str:
    return str(server.label)  # type: ignore[attr-defined]


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    return await asyncio.to_thread(model_folder, tmp_path / "model")


async def run(lane: Lane, sampling: Sampling = GREEDY) -> News:
    job = News()
    submit(lane, job, sampling)
    await job.until(lambda: job.is_over)
    return job


async def test_a_text_comes_with_its_tokens_counted(server: OtherServer, folder: Path) -> None:
    async with lane_to(server.entry(folder)) as (lane, news):
        assert news.card is not None
        assert (news.card.model, news.card.vocab_size) == ("other", 262)
        assert kind_of(server.entry(folder)) is ServerKind(server.kind)
        job = await run(lane)
        assert job.text == "abcdef"
        assert job.end.code is None
        assert job.end.reason is FinishReason.LENGTH
        assert (job.end.completion_tokens, len(job.ids), job.started) == (6, 6, 1)
        if label(server) in NAMES_IDS:
            assert job.ids == LETTER_IDS[:6]
        else:
            assert set(job.ids) == {NO_TOKEN_ID}
        assert lane.load == 0


async def test_an_end_token_ends_a_text(server: OtherServer, folder: Path) -> None:
    server.plan = lambda body: Script(tokens=3)
    async with lane_to(server.entry(folder)) as (lane, _):
        job = await run(lane)
        assert job.text == "abc"
        assert job.end.reason is FinishReason.STOP
        # One that counts by the text alone cannot see an end token.
        assert job.end.completion_tokens == (3 if label(server) == "triton-trtllm" else 4)


async def test_the_prompt_is_what_was_encoded(server: OtherServer, folder: Path) -> None:
    async with lane_to(server.entry(folder)) as (lane, _):
        await run(lane)
        (asked,) = server.asked
        prompt = asked.body.get("prompt") or asked.body.get("inputs") or asked.body["text_input"]
        ids = [0, *(LETTER_IDS[LETTERS.index(letter)] for letter in "hello")]
        assert prompt == (ids if isinstance(prompt, list) else "<|bos|>hello")


async def test_sampling_travels_in_the_servers_own_words(server: OtherServer, folder: Path) -> None:
    sampling = Sampling(max_tokens=4, temperature=0.5, top_p=0.9, top_k=7, seed=11, stop=("zz",))
    async with lane_to(server.entry(folder)) as (lane, _):
        await run(lane, sampling)
        (asked,) = server.asked
        said = asked.body.get("parameters", asked.body)
        limit = said.get("max_tokens", said.get("n_predict", said.get("max_new_tokens")))
        seed = said.get("seed", said.get("random_seed"))
        stop = said.get("stop", said.get("stop_words"))
        assert (limit, seed, stop) == (4, 11, ["zz"])
        assert said["temperature"] == pytest.approx(0.5)
        assert said["top_p"] == pytest.approx(0.9)
        assert said["top_k"] == 7


async def test_logprobs_are_those_of_the_tokens(server: OtherServer, folder: Path) -> None:
    async with lane_to(server.entry(folder)) as (lane, news):
        assert news.card is not None
        if label(server) not in WITH_LOGPROBS:
            if label(server) != "vllm-old":
                assert Feature.LOGPROBS in news.card.lacks
            return
        job = await run(lane, Sampling(max_tokens=3, temperature=0.0, logprobs=2))
        assert [entry.logprob for entry in job.logprobs] == [-0.5] * 3
        assert all([i for i, _ in entry.top] == [2, 3] for entry in job.logprobs)


async def test_a_cancel_stops_the_server(server: OtherServer, folder: Path) -> None:
    server.plan = lambda body: Script(step_s=0.002)
    async with lane_to(server.entry(folder, abort_ms=0)) as (lane, _):
        job = News()
        handle = submit(lane, job, Sampling(max_tokens=200, temperature=0.0))
        await job.until(lambda: len(job.ids) > 2)
        lane.cancel(handle, AbortCause.CANCEL)
        lane.cancel(handle, AbortCause.CANCEL)
        await job.until(lambda: job.is_over)
        assert (job.end.reason, job.end.code) == (FinishReason.CANCELLED, Code.CANCELLED)
        await server.until(lambda: server.running == 0)
        assert server.asked[0].is_aborted
        assert lane.load == 0


async def test_a_job_ends_at_its_deadline_whatever_the_server_says(
    server: OtherServer, folder: Path
) -> None:
    server.plan = lambda body: Script(stall_at=2)
    async with lane_to(server.entry(folder, abort_ms=0)) as (lane, _):
        job, cut = News(), News()
        submit(lane, job, budget_ms=300.0)
        submit(lane, cut, budget_ms=300.0, on_deadline=OnDeadline.PARTIAL)
        await job.until(lambda: job.is_over and cut.is_over)
        assert job.text == cut.text == "ab"
        assert (job.end.reason, job.end.code) == (FinishReason.DEADLINE, Code.DEADLINE_EXCEEDED)
        assert "after 2 tokens" in job.end.message
        assert (cut.end.reason, cut.end.code) == (FinishReason.DEADLINE, None)
        assert job.end.left_ms <= 0
        await server.until(lambda: server.running == 0)


async def test_the_deadline_travels_where_the_server_can_read_one(
    server: OtherServer, folder: Path
) -> None:
    async with lane_to(server.entry(folder)) as (lane, _):
        await run(lane)
        if isinstance(server, PlainTriton):
            assert server.deadlines[0] == pytest.approx(60, abs=30)
        elif label(server) == "llamacpp":
            assert 0 < server.asked[0].body["t_max_predict_ms"] <= 60_000


async def test_what_is_given_up_counts_as_load_for_as_long_as_an_abort_takes(
    server: OtherServer, folder: Path
) -> None:
    server.plan = lambda body: Script(stall_at=1)
    async with lane_to(server.entry(folder, abort_ms=150)) as (lane, news):
        assert news.card is not None
        assert news.card.abort_ms == 150.0
        job = News()
        handle = submit(lane, job)
        await job.until(lambda: len(job.ids) == 1)
        lane.cancel(handle, AbortCause.DISCONNECT)
        await job.until(lambda: job.is_over)
        assert lane.load == 1
        await job.until(lambda: lane.load == 0)


async def test_a_connection_that_breaks_loses_its_job_and_no_other(
    server: OtherServer, folder: Path
) -> None:
    def plan(body: dict[str, object]) -> Script:
        return Script(cut_at=2) if len(server.asked) == 0 else Script(step_s=0.01)

    server.plan = plan
    async with lane_to(server.entry(folder)) as (lane, news):
        broken, other = News(), News()
        submit(lane, broken)
        await server.until(lambda: len(server.asked) == 1)
        submit(lane, other)
        await other.until(lambda: broken.is_over and other.is_over)
        assert len(broken.lost) == 1
        assert not broken.ends
        assert broken.text == "ab"
        assert other.text == "abcdef"
        assert news.opened == 1


async def test_a_body_that_just_ends_is_no_end_of_a_text(server: OtherServer, folder: Path) -> None:
    server.plan = lambda body: Script(ends_early=True)
    async with lane_to(server.entry(folder)) as (lane, _):
        job = await run(lane)
        assert (len(job.lost), job.ends) == (1, [])


async def test_an_error_in_the_middle_is_the_engines(server: OtherServer, folder: Path) -> None:
    server.plan = lambda body: Script(fail_at=3)
    async with lane_to(server.entry(folder)) as (lane, _):
        job = await run(lane)
        assert (job.end.reason, job.end.code) == (FinishReason.ERROR, Code.ENGINE_ERROR)
        assert "the engine failed" in job.end.message
        assert job.text == "abc"


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, Code.INVALID_REQUEST), (500, Code.ENGINE_ERROR)],
)
async def test_a_refusal_says_why(
    server: OtherServer, folder: Path, status: int, code: Code
) -> None:
    server.plan = lambda body: Script(status=status)
    async with lane_to(server.entry(folder)) as (lane, _):
        job = await run(lane)
        assert (job.end.reason, job.end.code) == (FinishReason.ERROR, code)
        assert "not now" in job.end.message


async def test_stop_strings_end_the_text_before_them(server: OtherServer, folder: Path) -> None:
    if label(server) not in LEAVES_STOPS:
        pytest.skip("this server leaves stop strings out itself")
    async with lane_to(server.entry(folder)) as (lane, _):
        job = await run(lane, Sampling(max_tokens=9, temperature=0.0, stop=("de", "x")))
        assert (job.text, job.end.stop) == ("abc", "de")
        assert job.end.reason is FinishReason.STOP
        assert job.end.completion_tokens == 5
        unfinished = await run(lane, Sampling(max_tokens=4, temperature=0.0, stop=("de",)))
        assert unfinished.text == "abcd"


async def test_a_server_that_goes_loses_all_jobs_and_is_found_again(
    server: OtherServer, folder: Path
) -> None:
    server.plan = lambda body: Script(stall_at=1)
    async with lane_to(server.entry(folder)) as (lane, news):
        jobs = [News(), News()]
        for job in jobs:
            submit(lane, job)
        await jobs[0].until(lambda: all(job.ids for job in jobs))
        await server.stop()
        await jobs[0].until(lambda: all(job.is_over for job in jobs))
        assert all(len(job.lost) == 1 and not job.ends for job in jobs)
        await news.until(lambda: not lane.is_open)
        assert news.closed
        server.plan = lambda body: Script()
        await server.start()
        await news.until(lambda: lane.is_open)
        assert (await run(lane)).text == "abcdef"
        assert news.opened == 2


async def test_one_that_is_not_healthy_is_not_used(server: OtherServer, folder: Path) -> None:
    async with lane_to(server.entry(folder)) as (lane, news):
        server.is_unhealthy = True
        await news.until(lambda: not lane.is_open)
        assert news.closed[0]
        server.is_unhealthy = False
        await news.until(lambda: lane.is_open)


async def test_a_silent_server_is_silence_and_no_end(server: OtherServer, folder: Path) -> None:
    """Whether silence counts is its owner's to say (OR-6)."""
    async with lane_to(server.entry(folder)) as (lane, news):
        server.is_silent = True
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


async def test_its_pace_is_seen_from_outside(server: OtherServer, folder: Path) -> None:
    server.plan = lambda body: Script(step_s=0.01)
    async with lane_to(server.entry(folder)) as (lane, news):
        await run(lane, Sampling(max_tokens=40, temperature=0.0))
        await news.until(lambda: news.stats is not None and news.stats.tokens_total == 40)
        assert news.stats is not None
        assert 20 <= news.stats.steps_total <= 40
        assert news.stats.busy_ms_total >= 10 * news.stats.steps_total * 0.5


async def test_the_card_says_what_the_server_cannot(server: OtherServer, folder: Path) -> None:
    async with lane_to(server.entry(folder, slots=3, context=128, alias="mine", name="n1")) as (
        lane,
        news,
    ):
        card = news.card
        assert card is not None
        assert lane.address == "n1"
        assert (card.model, card.max_running, card.context_tokens) == ("mine", 3, 128)
        assert list(card.lacks) == sorted(card.lacks)
        assert {Feature.GRAMMAR, Feature.KV_EVENTS, Feature.STEP_ABORT} <= set(card.lacks)
        assert (Feature.TOKEN_IDS in card.lacks) is (label(server) != "vllm")
        assert card.abort_ms > 0
        assert not card.can_pause
        assert not card.can_continue


async def test_closing_a_lane_loses_its_jobs(server: OtherServer, folder: Path) -> None:
    server.plan = lambda body: Script(stall_at=1)
    job = News()
    async with lane_to(server.entry(folder)) as (lane, _):
        submit(lane, job)
        await job.until(lambda: len(job.ids) == 1)
    assert len(job.lost) == 1
    await server.until(lambda: server.running == 0)


@pytest.mark.parametrize("slices", [1, 3, 7])
@pytest.mark.parametrize("kind", ["vllm", "llamacpp", "tgi"])
async def test_events_may_come_in_any_pieces(folder: Path, kind: str, slices: int) -> None:
    server = KINDS[kind]()
    await server.start()
    server.plan = lambda body: Script(tokens=3, slices=slices)
    async with lane_to(server.entry(folder)) as (lane, _):
        assert (await run(lane)).text == "abc"
    await server.stop()


async def test_tokens_that_llama_cpp_keeps_to_itself_are_counted(folder: Path) -> None:
    """One that ends within a character is told of with the next."""
    server = LlamaCppServer()
    await server.start()
    server.plan = lambda body: Script(spoken=lambda at: "" if at in (1, 2) else LETTERS[at])
    async with lane_to(server.entry(folder)) as (lane, _):
        job = await run(lane)
        assert job.text == "adef"
        assert job.ids == [LETTER_IDS[0], NO_TOKEN_ID, NO_TOKEN_ID, *LETTER_IDS[3:6]]
        assert job.end.completion_tokens == 6
    await server.stop()


async def test_or24_a_server_that_can_keeps_tenants_prefixes_apart(folder: Path) -> None:
    server = VllmServer()
    await server.start()
    async with lane_to(server.entry(folder)) as (lane, _):
        for salt in ("", "acme"):
            job = News()
            submit(lane, job, cache_salt=salt)
            await job.until(lambda job=job: job.is_over)  # type: ignore[misc]
        assert [asked.body.get("cache_salt") for asked in server.asked] == [None, "acme"]
    await server.stop()


async def test_a_key_is_sent_from_its_file(folder: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    await asyncio.to_thread(key.write_text, "s3cret\n")
    server = VllmServer()
    await server.start()
    async with lane_to(server.entry(folder, key_file=key)) as (lane, _):
        await run(lane)
        asked: Asked = server.asked[0]
        assert asked.headers["authorization"] == "Bearer s3cret"
        assert asked.headers["x-request-id"] == "corr-1"
    await server.stop()
