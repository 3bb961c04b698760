"""A pool of unlike pods on virtual time, and ways to share requests out among them.

A pod computes in steps, as engines that batch do: every running request gets a token a step, a step
takes a base, something for each row and for each prompt token, and what finds no slot waits in
order of arrival. A client hangs up at its deadline, which frees the slot at the next step.
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from multidict import CIMultiDict

from orchestrator.api.http.context import context_of
from orchestrator.api.openai.shapes import OPENAI
from orchestrator.clock import instant
from orchestrator.errors import DeadlineExceeded
from orchestrator.settings import whole_settings
from picker.asked import read_asked
from picker.picker import EndpointPicker, Picked
from picker.pod import AnswerEnd
from picker.pods import Pods
from picker.section import PickerSection
from picker.vllm_page import VllmPage

POLL_S = 0.5


@dataclass(frozen=True)
class Speed:
    """What a pod's steps take, in ms, and how many requests it runs at once."""

    base_ms: float
    row_ms: float
    prompt_token_ms: float
    slots: int

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers per second with all slots taken, prompts aside."""
        return 1000 * self.slots / (self.base_ms + self.row_ms * self.slots)


@dataclass(eq=False)
class Request:
    arrives: float
    due: float
    prompt_tokens: int
    tokens: int
    made: int = 0
    first_at: float = 0.0
    done_at: float | None = None
    picked: Picked | None = None


@dataclass(eq=False)
class Server:
    """One pod's own side."""

    address: str
    speed: Speed
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    steps: int = 0
    gaps: int = 0
    gaps_s: float = 0.0
    tokens: int = 0
    prompts: int = 0
    is_stepping: bool = False

    @property
    def jobs(self) -> int:
        return len(self.waiting) + len(self.running)

    def page(self) -> VllmPage:
        return VllmPage(
            running=len(self.running),
            waiting=len(self.waiting),
            models=frozenset({"m"}),
            steps=self.steps,
            gaps=self.gaps,
            gaps_s=self.gaps_s,
            tokens=self.tokens,
            prompt_tokens=self.prompts,
        )

    def begin_step(self) -> float:
        """Seconds that the next step takes."""
        new = 0
        while self.waiting and len(self.running) < self.speed.slots:
            request = self.waiting.popleft()
            self.running.append(request)
            new += request.prompt_tokens
        speed = self.speed
        ms = speed.base_ms + speed.row_ms * len(self.running) + speed.prompt_token_ms * new
        decoding = sum(1 for request in self.running if request.made)
        self.gaps += decoding
        self.gaps_s += decoding * ms / 1000
        self.prompts += new
        return ms / 1000

    def end_step(self, now: float) -> list[Request]:
        """Requests that are done, or whose clients have hung up."""
        self.steps += 1
        over = []
        for request in self.running:
            request.made += 1
            self.tokens += 1
            request.first_at = request.first_at or now
            if request.made >= request.tokens:
                request.done_at = now
            if request.done_at is not None or now >= request.due:
                over.append(request)
        late = [request for request in self.waiting if now >= request.due]
        self.running = [request for request in self.running if request not in over]
        self.waiting = deque(request for request in self.waiting if request not in late)
        return over + late


class VirtualClock:
    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def unix(self) -> float:
        return 1_800_000_000.0 + self.at

    def call_at(self, when: float, callback: Callable[[], object]) -> None:  # type: ignore[override]
        raise AssertionError("nothing here waits")


class Policy:
    """Shares requests out; None refuses one."""

    def choose(self, request: Request, servers: list[Server]) -> Server | None:
        raise NotImplementedError

    def poll(self, servers: list[Server]) -> None:
        """Read every pod's metrics."""

    def progressed(self, request: Request) -> None: ...

    def over(self, request: Request) -> None: ...


class RoundRobin(Policy):
    def __init__(self) -> None:
        self._turns = itertools.count()

    def choose(self, request: Request, servers: list[Server]) -> Server | None:
        return servers[next(self._turns) % len(servers)]


class LeastRequests(Policy):
    """Knows what is on each pod at this very moment."""

    def choose(self, request: Request, servers: list[Server]) -> Server | None:
        return min(servers, key=lambda server: server.jobs)


class ByPicker(Policy):
    """The endpoint picker, with metrics as old as polls make them."""

    def __init__(self, clock: VirtualClock, addresses: list[str], **picker: object) -> None:
        settings = whole_settings()(picker={"endpoints": tuple(addresses), **picker})
        self.clock = clock
        self.settings = settings
        self.pods = Pods(settings.section(PickerSection), clock)  # type: ignore[arg-type]
        for address in addresses:
            self.pods.add(address)
        self.picker = EndpointPicker(settings, self.pods, clock)  # type: ignore[arg-type]
        self.refused = 0

    def choose(self, request: Request, servers: list[Server]) -> Server | None:
        headers = CIMultiDict(
            {
                ":path": "/v1/completions",
                "X-Timeout-Ms": f"{1000 * (request.due - request.arrives):.3f}",
            }
        )
        context = context_of("/v1/completions", headers, instant(self.clock), [OPENAI])  # type: ignore[arg-type]
        words = "word" * request.prompt_tokens
        body = f'{{"model":"m","prompt":"{words}","max_tokens":2048}}'.encode()
        try:
            picked = self.picker.pick(read_asked(headers, body, context, self.settings.deadlines))
        except DeadlineExceeded:
            self.refused += 1
            return None
        request.picked = picked
        return next(server for server in servers if server.address == picked.endpoints[0])

    def poll(self, servers: list[Server]) -> None:
        for server in servers:
            pod = self.pods.find(server.address)
            assert pod is not None
            pod.take_page(server.page(), self.clock.at, self.clock.at)

    def progressed(self, request: Request) -> None:
        assert request.picked is not None
        self.picker.progressed(request.picked, request.made)

    def over(self, request: Request) -> None:
        assert request.picked is not None
        end = (
            AnswerEnd(request.made, request.prompt_tokens) if request.done_at is not None else None
        )
        self.picker.ended(request.picked, end)


def arrivals(
    rng: random.Random, rate: float, seconds: float, least_s: float = 1.0, most_s: float = 8.0
) -> Iterator[Request]:
    """Requests at random moments, ``rate`` a second, with deadlines of all sorts."""
    at = 0.0
    while (at := at + rng.expovariate(rate)) < seconds:
        yield Request(
            at,
            at + rng.uniform(least_s, most_s),
            prompt_tokens=max(8, round(rng.lognormvariate(5.0, 0.8))),
            tokens=max(4, min(1000, round(rng.lognormvariate(4.4, 0.7)))),
        )


def run(policy: Policy, clock: VirtualClock, servers: list[Server], work: list[Request]) -> float:
    """Share of ``work`` that is done by its deadline."""
    order = itertools.count()
    events: list[tuple[float, int, Callable[[], None]]] = []

    def at(when: float, what: Callable[[], None]) -> None:
        heapq.heappush(events, (when, next(order), what))

    def step(server: Server) -> None:
        if server.jobs and not server.is_stepping:
            server.is_stepping = True
            at(clock.at + server.begin_step(), lambda: stepped(server))

    def stepped(server: Server) -> None:
        server.is_stepping = False
        for request in server.end_step(clock.at):
            policy.over(request)
        for request in server.running:
            policy.progressed(request)
        step(server)

    def arrive(request: Request) -> None:
        server = policy.choose(request, servers)
        if server is not None:
            server.waiting.append(request)
            step(server)

    last = max(request.due for request in work)

    def poll() -> None:
        policy.poll(servers)
        if clock.at < last:
            at(clock.at + POLL_S, poll)

    for request in work:
        at(request.arrives, lambda request=request: arrive(request))  # type: ignore[misc]
    at(0.0, poll)
    while events:
        clock.at, _, what = heapq.heappop(events)
        what()
    met = sum(1 for r in work if r.done_at is not None and r.done_at <= r.due)
    return met / len(work)
