"""A lane of any kind with an owner and jobs that note what they are told."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from orchestrator.clock import LoopClock
from orchestrator.errors import TidegateError
from orchestrator.lanes import Lane, LaneConfig, make_lane
from protocol import (
    Delta,
    End,
    Frame,
    ModelCard,
    OnDeadline,
    PromptLogprobs,
    Sampling,
    TokenLogprob,
    WorkerStats,
)
from tests.support.other_servers import LETTER_IDS, LETTERS

GREEDY = Sampling(max_tokens=6, temperature=0.0)


class News:
    """Owner of a lane, and sink of its jobs: notes what it is told."""

    def __init__(self) -> None:
        self.opened = 0
        self.closed: list[str] = []
        self.card: ModelCard | None = None
        self.stats: WorkerStats | None = None
        self.ids: list[int] = []
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.started = self.paused = self.resumed = 0
        self.ends: list[End] = []
        self.lost: list[str] = []

    @property
    def is_over(self) -> bool:
        return bool(self.ends or self.lost)

    @property
    def end(self) -> End:
        (end,) = self.ends
        assert not self.lost
        return end

    @property
    def text(self) -> str:
        return "".join(self.texts) + (self.end.tail if self.ends else "")

    async def until(self, done: Callable[[], bool]) -> None:
        while not done():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.002)

    def lane_opened(self, lane: Lane, first: Frame) -> None:
        self.opened += 1
        self.lane_reported(lane, first)

    def lane_reported(self, lane: Lane, frame: Frame) -> None:
        self.card = frame.card or self.card
        self.stats = frame.stats or self.stats

    def lane_closed(self, lane: Lane, reason: str) -> None:
        self.closed.append(reason)

    def emission_sampled(self, seconds: float, tokens: int) -> None: ...

    def on_cached(self, tokens: int) -> None: ...

    def on_started(self, wait_ms: float) -> None:
        self.started += 1

    def on_prompt(self, logprobs: PromptLogprobs) -> None: ...

    def on_tokens(self, delta: Delta, now: float) -> None:
        assert not self.is_over, "tokens after the end"
        assert len(delta.ids) == len(delta.texts)
        self.ids += delta.ids
        self.texts += delta.texts
        if delta.logprobs is not None:
            assert len(delta.logprobs) == len(delta.ids)
            self.logprobs += delta.logprobs

    def on_paused(self) -> None:
        self.paused += 1

    def on_resumed(self) -> None:
        self.resumed += 1

    def on_ended(self, end: End) -> None:
        self.ends.append(end)

    def on_lost(self, error: TidegateError) -> None:
        self.lost.append(error.message)


@asynccontextmanager
async def lane_to(entry: str, *, opens: bool = True) -> AsyncIterator[tuple[Lane, News]]:
    """``opens``: it is open."""
    news = News()
    clock = LoopClock(asyncio.get_running_loop())
    lane = make_lane(entry, LaneConfig(), news, clock, random.Random(3))
    lane.start()
    try:
        await news.until(lambda: lane.is_open or not opens)
        yield lane, news
    finally:
        await lane.close()


def submit(
    lane: Lane,
    sink: News,
    sampling: Sampling = GREEDY,
    *,
    budget_ms: float = 60_000.0,
    on_deadline: OnDeadline = OnDeadline.ERROR,
    prompt: str | list[int] = "hello",
    session: str = "",
    cache_salt: str = "",
) -> int:
    ids = prompt
    if isinstance(prompt, str):
        ids = [0, *(LETTER_IDS[LETTERS.index(letter)] for letter in prompt)]
    return lane.submit(
        sink,
        token_ids=ids,
        sampling=sampling,
        budget_ms=budget_ms,
        deadline_unix_ms=0,
        on_deadline=on_deadline,
        correlation_id="corr-1",
        session=session,
        cache_salt=cache_salt,
    )
