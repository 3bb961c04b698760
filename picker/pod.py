"""State of one pod: its load, from its metrics and from the requests routed to it; its pace.

Metrics lag. Our routed requests are exact but incomplete, because others may use the pod. So the
load is our live requests, plus the jobs in the metrics that our requests do not explain.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

from msgspec.structs import replace as replace_fields

from orchestrator.instances.candidate import UNLIMITED, Candidate
from orchestrator.prediction.step_learner import StepLearner
from orchestrator.prediction.step_model import Load, StepModel
from picker.choice import Outlook
from picker.vllm_page import VllmPage
from protocol import CERTAIN_AFTER_STEPS, CERTAIN_SHARE, WorkerStats

STEP_TOKENS = 2048
"""Maximum prompt tokens of a step: vLLM's default, which no metric reports."""
STALE_AFTER_S: Final = 5.0
"""Age in seconds at which a pod's metrics are stale: ten polls."""
FIRST_SLOTS: Final = 64
"""Assumed maximum of parallel jobs of a pod, until its metrics show another number."""
_MAX_SLOTS = 4096
_MIN_TOLD = 8
"""Minimum answer length in tokens for a measurement of the pod's pace."""
_FIRST_OUTPUT = 128.0
_SMOOTHING = 0.1
_NO_STATS = WorkerStats(0, 0, 0, 0, 0, 0.0, 0, 0, 0, 0.0)


@dataclass(slots=True, eq=False)
class Flight:
    """One live request that was routed to a pod. Times are seconds of the clock."""

    sent_at: float
    prompt_tokens: int
    output_tokens: int
    """Usual number of tokens of its answer."""
    first_at: float = 0.0
    tokens: int = 0
    """Tokens of the answer that have passed so far."""
    unseen_since: float = math.inf
    """When the gateway stopped reporting it before its answer; it may still run."""


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The length of a complete answer."""

    tokens: int
    prompt_tokens: int = 0
    """Tokens of its prompt; 0 if the answer does not state it."""
    finished: bool = True
    """Whether the model ended it, not a limit."""
    is_told: bool = True
    """Whether the server reported the number. Otherwise it counts chunks, and a chunk may have
    several tokens."""


class Pod:
    def __init__(self, address: str) -> None:
        self.address = address
        self.retiring_since: float | None = None
        """When discovery stopped naming it, in seconds of the clock; None while it is named."""
        self.page: VllmPage | None = None
        self.page_at = -math.inf
        """When its metrics were last read, in seconds of the clock."""
        self.fault = "not asked yet"
        """Why its metrics cannot be read; empty while they can."""
        self.is_reachable = True
        self.flights: set[Flight] = set()
        self._slots = FIRST_SLOTS
        self._queued_at = 0
        """Jobs that ran when jobs waited at the last poll; 0 if none waited."""
        self._foreign = 0
        self._foreign_before = 0
        self._learner = StepLearner(_MAX_SLOTS, STEP_TOKENS)
        self._busy_ms = 0.0
        self._steps = 0
        self._fastest_token_ms = math.inf
        self._told = 0
        """Steps and answers since the last one that was faster than all earlier ones by more than
        the margin of certainty."""
        self._mean_output = _FIRST_OUTPUT

    # ── what it reports ────────────────────────────────────────────────────────────────────────

    def take_page(self, page: VllmPage, asked_at: float, now: float) -> None:
        before, self.page = self.page, page
        self.page_at, self.fault, self.is_reachable = now, "", True
        unseen = [flight for flight in self.flights if flight.unseen_since < math.inf]
        self.flights -= {flight for flight in unseen if flight.unseen_since <= asked_at}
        active = page.running + page.waiting
        foreign = max(0, active - len(self.flights))
        # A page may be from before a request of ours ended. So two pages must agree, except for
        # requests that the gateway no longer reports.
        self._foreign = foreign if unseen else min(foreign, self._foreign_before)
        self._foreign_before = foreign
        self._learn_slots(page)
        if before is not None:
            self._learn_steps(before, page)

    def _learn_slots(self, page: VllmPage) -> None:
        """If jobs wait in two consecutive polls, the running jobs are the maximum."""
        if page.running > self._slots:
            self._slots = page.running
        queued = page.running if page.waiting else 0
        if queued and self._queued_at:
            self._slots = max(queued, self._queued_at)
        self._queued_at = queued

    def _learn_steps(self, before: VllmPage, page: VllmPage) -> None:
        """Steps and their times: a row of a batch gets one token per step."""
        steps, gaps = page.steps - before.steps, page.gaps - before.gaps
        gaps_s, tokens = page.gaps_s - before.gaps_s, page.tokens - before.tokens
        if min(steps, gaps, tokens) <= 0 or gaps_s <= 0:
            return  # nothing new, or another process
        self._steps += steps
        self._busy_ms += 1000 * steps * gaps_s / gaps
        self._see_token_ms(1000 * gaps_s / gaps, steps)
        self._learner.observe(
            replace_fields(
                _NO_STATS,
                running=page.running,
                waiting=page.waiting,
                tokens_total=page.tokens,
                steps_total=self._steps,
                busy_ms_total=self._busy_ms,
                prefill_tokens_total=page.prompt_tokens,
            )
        )

    # ── what was routed to it ────────────────────────────────────────────────────────────────

    def add(self, flight: Flight) -> None:
        self.flights.add(flight)
        self._mean_output += _SMOOTHING * (flight.output_tokens - self._mean_output)

    def ended(self, flight: Flight, end: AnswerEnd, now: float) -> None:
        """Learn from a request whose answer ended by itself, and forget it."""
        load, took_ms = self._load(), 1000 * (now - flight.sent_at)
        self.flights.discard(flight)
        if not end.is_told or end.tokens < _MIN_TOLD or took_ms <= 0:
            return
        token_ms = took_ms / end.tokens
        if 0 < flight.first_at < now and flight.tokens >= _MIN_TOLD:
            token_ms = 1000 * (now - flight.first_at) / (end.tokens - 1)
        self._see_token_ms(token_ms, 1)
        if not self._steps:  # a pod whose metrics do not show steps
            told = {"running": load.running, "waiting": load.waiting, "step_ms": token_ms}
            self._learner.observe(replace_fields(_NO_STATS, **told))

    def _see_token_ms(self, token_ms: float, count: int) -> None:
        self._told += count
        if token_ms < CERTAIN_SHARE * self._fastest_token_ms:
            self._told = 0  # a certain prediction was wrong
        self._fastest_token_ms = min(self._fastest_token_ms, token_ms)

    # ── as a choice sees it ──────────────────────────────────────────────────────────────────

    @property
    def load(self) -> int:
        """Number of jobs that it has, ours and others'."""
        return len(self.flights) + self._foreign

    @property
    def _pace(self) -> StepModel | None:
        learner = self._learner
        return replace(learner.model, slots=self._slots) if learner.is_measured else None

    def _load(self) -> Load:
        running = min(self.load, self._slots)
        prefill, ours = 0, 0.0
        for flight in self.flights:
            prefill += 0 if flight.tokens else flight.prompt_tokens
            ours += max(flight.output_tokens - flight.tokens, 1)
        # Other jobs are unknown: assume that they are like ours, and half done.
        return Load(
            running=running,
            waiting=self.load - running,
            prefill_tokens=prefill if self.load <= self._slots else 0,
            decode_tokens=round(ours + self._foreign * self._mean_output / 2),
        )

    def is_known(self, now: float) -> bool:
        """Whether its metrics are recent enough to use."""
        return now - self.page_at <= STALE_AFTER_S

    def prospect(self, now: float) -> Outlook:
        """The pod's state at ``now``, as input of a choice."""
        pace, load, page = self._pace, self._load(), self.page
        free = 0 if page is None else round(page.kv_blocks * (1 - page.kv_used))
        candidate = Candidate(
            name=self.address,
            model="",
            vocabulary=b"",
            ready=True,
            limit=UNLIMITED,
            load=self.load,
            kv_free=free,
            step=None if pace is None else pace.under(load),
            slots=self._slots,
        )
        is_known = self._told >= CERTAIN_AFTER_STEPS
        fastest = CERTAIN_SHARE * self._fastest_token_ms if is_known else 0.0
        return Outlook(
            candidate,
            pace,
            load,
            fastest,
            is_known=self.is_known(now),
            is_reachable=self.is_reachable,
        )
