"""``tidegate bench``: the load, and the outcome of each request."""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tidegate import _clock
from tidegate.cli.load_report import Report
from tidegate.cli.terminal import console, print_json
from tidegate.client import Client
from tidegate.errors import (
    ApiError,
    AuthFailed,
    ConnectFailed,
    InvalidRequest,
    NotFound,
    TidegateError,
)
from tidegate.requests import TaskOptions
from tidegate.results import End, Token

_CONCURRENCY = 8
_REQUESTS = 64
_WORDS = [
    "river",
    "stone",
    "lamp",
    "garden",
    "window",
    "winter",
    "paper",
    "silver",
    "harbour",
    "morning",
    "bread",
    "letter",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The load asked for: with a ``rate`` per second an open loop, else ``concurrency`` clients."""

    model: str | None
    concurrency: int | None
    rate: float | None
    requests: int | None
    seconds: float | None
    prompt_words: int
    max_tokens: int
    deadline_ms: int
    first_token_ms: int | None
    stop_early: bool
    seed: int

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Plan":
        is_bounded = given["requests"] is not None or given["seconds"] is not None
        chosen = dict(given)
        if chosen["rate"] is None and chosen["concurrency"] is None:
            chosen["concurrency"] = _CONCURRENCY
        if not is_bounded:
            chosen["requests"] = _REQUESTS
        return cls(**chosen)

    def options(self) -> TaskOptions:
        options = TaskOptions(
            max_tokens=self.max_tokens,
            ignore_eos=not self.stop_early,
            deadline=timedelta(milliseconds=self.deadline_ms),
        )
        if self.model is not None:
            options["model"] = self.model
        if self.first_token_ms is not None:
            options["first_token"] = timedelta(milliseconds=self.first_token_ms)
        return options


@dataclass(slots=True)
class Sample:
    """One request. Times are seconds; those of tokens count from when it was sent."""

    sent_at: float
    outcome: str = ""
    code: str | None = None
    tokens: int = 0
    first_s: float | None = None
    last_s: float | None = None
    took_s: float = 0.0


@dataclass(slots=True)
class Run:
    """A load that runs."""

    client: Client
    plan: Plan
    progress: Progress
    samples: list[Sample] = field(default_factory=list)
    began: float = field(default_factory=_clock.now)
    begun: int = 0

    async def drive(self) -> None:
        """Send all requests, and wait for their ends."""
        with self.progress:
            bar = self.progress.add_task("requests", total=self.plan.requests)
            async with asyncio.TaskGroup() as group:
                if self.plan.rate is None:
                    for _ in range(self.plan.concurrency or _CONCURRENCY):
                        group.create_task(self._client_loop(bar))
                else:
                    async for prompt in self._arrivals(self.plan.rate):
                        group.create_task(self._one(prompt, bar))

    async def _client_loop(self, bar: Any) -> None:
        while (prompt := self._next_prompt()) is not None:
            await self._one(prompt, bar)

    async def _arrivals(self, rate: float) -> AsyncIterator[str]:
        """Prompts of a Poisson process of ``rate`` per second; none waits for an answer."""
        draw = random.Random(self.plan.seed)
        due = self.began
        while (prompt := self._next_prompt()) is not None:
            yield prompt
            due += draw.expovariate(rate)
            await _clock.sleep(max(0.0, due - _clock.now()))

    def _next_prompt(self) -> str | None:
        """Next prompt, with its number first; None once enough has been sent."""
        plan = self.plan
        if plan.requests is not None and self.begun >= plan.requests:
            return None
        if plan.seconds is not None and _clock.now() - self.began >= plan.seconds:
            return None
        self.begun += 1
        draw = random.Random(f"{plan.seed} {self.begun}")
        return " ".join([str(self.begun), *draw.choices(_WORDS, k=plan.prompt_words - 1)])

    async def _one(self, prompt: str, bar: Any) -> None:
        sample = Sample(_clock.now())
        try:
            async with aclosing(self.client.stream(prompt, **self.plan.options())) as events:
                async for event in events:
                    if isinstance(event, Token):
                        sample.last_s = _clock.now() - sample.sent_at
                        sample.first_s = sample.first_s or sample.last_s
                        sample.tokens += len(event.token_ids)
                    elif isinstance(event, End):
                        sample.outcome = event.outcome
        except (AuthFailed, InvalidRequest, NotFound, ConnectFailed):
            raise  # every other one would come to the same
        except ApiError as error:
            late = "missed" if error.code.startswith("deadline") else "failed"
            # A status is the answer to a submission, and so nothing has run.
            sample.outcome = late if error.status is None else "refused"
            sample.code = error.code
        except TidegateError as error:
            sample.outcome, sample.code = "failed", type(error).__name__
        sample.took_s = _clock.now() - sample.sent_at
        self.samples.append(sample)
        self.progress.advance(bar)


async def run(client: Client, url: str, plan: Plan, *, as_json: bool) -> int:
    """Run the load and print the report; returns 1 when not one request was answered."""
    screen = console(to_stderr=True)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
    )
    load = Run(client, plan, progress)
    try:
        await load.drive()
    except* TidegateError as group:
        raise _first(group) from None
    finally:  # Ctrl-C leaves what there is until then
        report = Report.of(plan, url, load.samples, _clock.now() - load.began)
        if load.samples and as_json:
            print_json(report)
        elif load.samples:
            report.show(console())
    return 0 if report.tokens else 1


def _first(group: BaseExceptionGroup[TidegateError]) -> TidegateError:
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, TidegateError)
    return found
