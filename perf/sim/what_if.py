"""``python -m perf.sim.what_if FILE --request ID``: what alone would have met a missed request.

``FILE`` is what an operator's route gave::

    curl -H "Authorization: Bearer $KEY" http://127.0.0.1:8080/admin/recording > FILE

``ID`` is a task's id or its answer's. The requests of the half minute before it and those during it
are replayed as they were, on instances as fast as the first that took work then, and once more
with one thing changed at a time. An answer is as long as it was; one that something cut is as long
as half of such answers are. The status is 1 where there is nothing to replay.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from orchestrator.api.http.finding import task_id_of
from orchestrator.prediction.step_model import StepModel
from orchestrator.tasks.deadline import Parts
from orchestrator.tasks.job import Priority
from orchestrator.tasks.work import Marks
from perf.sim.arrivals import SimArrival
from perf.sim.replay.worker import WorkerSpec
from perf.sim.simulate import Fleet, simulate
from protocol import FinishReason, OnDeadline, Outcome
from worker.runner.synthetic import StepCost

WARM_S: Final = 30.0
"""Seconds before the asked request from which on others are replayed."""
MAX_REQUESTS: Final = 400
"""Most requests that are replayed, the latest ones."""
_BEFORE_S: Final = 1.0
"""Seconds of a replay before its first request, in which the instances come up."""
_MISSES: Final = (Outcome.MISSED, Outcome.PARTIAL, Outcome.REFUSED)


class RecordedRequest(msgspec.Struct, frozen=True):
    """One request, and what became of it; ``outcome`` is None while it was under way."""

    id: str
    tenant: str
    model: str
    priority: Priority
    deadline_at: float
    parts: Parts
    on_deadline: OnDeadline
    prompt_tokens: int
    cached_tokens: int
    max_tokens: int
    is_length_stated: bool
    left: tuple[float, ...]
    """Equally likely lengths of the answer, in tokens, as known when it came."""
    tokens: int
    marks: Marks
    outcome: Outcome | None = None
    reason: FinishReason | None = None

    @property
    def ended(self) -> float:
        return math.inf if self.outcome is None else self.marks.ended

    @property
    def length(self) -> int:
        """Tokens of its answer in a replay."""
        if self.is_length_stated:
            return self.max_tokens
        is_whole = self.reason is FinishReason.STOP or self.tokens >= self.max_tokens
        longer = [round(n) for n in self.left if self.tokens < n < self.max_tokens]
        if is_whole or self.outcome not in _MISSES:
            return max(1, self.tokens)
        return longer[len(longer) // 2] if longer else self.max_tokens

    def arrival(self, begin: float) -> SimArrival:
        """The request as the simulator has it, with times since ``begin``."""
        # A worker on virtual time has no sentences to finish; either ends in time.
        is_finish = self.on_deadline is OnDeadline.FINISH
        return SimArrival(
            at_s=self.marks.received - begin,
            prompt_tokens=max(1, self.prompt_tokens - self.cached_tokens),
            # An answer as long as it may be counts as one whose length is stated.
            max_tokens=self.max_tokens
            + (not self.is_length_stated and self.length >= self.max_tokens),
            length=self.length,
            deadline_ms=1000 * (self.deadline_at - self.marks.received),
            tenant=self.tenant,
            priority=self.priority,
            on_deadline=OnDeadline.FIT if is_finish else self.on_deadline,
            first_token_ms=1000 * (self.parts.first_token_at - self.marks.received),
            token_gap_ms=1000 * self.parts.token_gap_s,
        )


class InstanceAt(msgspec.Struct, frozen=True):
    """An instance at one moment. ``kv_blocks`` is 0 where it does not tell."""

    at: float
    name: str
    model: str
    is_ready: bool
    context_tokens: int
    block_tokens: int
    kv_blocks: int
    max_running: int
    max_step_tokens: int
    min_start_ms: float
    pace: StepModel


class Recorded(msgspec.Struct, frozen=True):
    """All that a service recorded."""

    settings: dict[str, Any]
    requests: list[RecordedRequest]
    states: list[InstanceAt]

    @classmethod
    def read(cls, text: bytes) -> "Recorded":
        """Read what the route gave. Raises ``msgspec.MsgspecError``."""
        told = msgspec.json.decode(text, type=dict[str, Any])
        for one in told.get("requests", ()):  # what never comes is null there
            one["parts"] = {name: at for name, at in one["parts"].items() if at is not None}
        return msgspec.convert(told, cls)

    def around(self, asked: RecordedRequest) -> list[RecordedRequest]:
        """The requests that are replayed, in the order in which they came."""
        begin, over = asked.marks.received - WARM_S, max(asked.deadline_at, asked.marks.ended)
        near = [
            one
            for one in self.requests
            if one.model == asked.model and one.ended >= begin and one.marks.received <= over
        ]
        near.sort(key=lambda one: one.marks.received)
        last = near.index(asked) + MAX_REQUESTS // 2
        return near[max(0, last - MAX_REQUESTS) : max(last, MAX_REQUESTS)]

    def instances(self, asked: RecordedRequest) -> list[InstanceAt]:
        """The instances that took work when ``asked`` came."""
        latest: dict[str, InstanceAt] = {}
        for state in sorted(self.states, key=lambda one: one.at):
            if state.model == asked.model and (state.at <= asked.marks.received or not latest):
                latest[state.name] = state
        return [one for one in latest.values() if one.is_ready] or list(latest.values())

    def replay(
        self, asked: RecordedRequest, *, alone: bool = False, more: int = 0, let_in: bool = False
    ) -> dict[str, bool]:
        """Whether each request is met, by its id: with ``asked`` alone, with ``more`` instances,
        or with ``asked`` neither refused nor given up. Those that do not end are left out."""
        requests = [asked] if alone else self.around(asked)
        begin, found = requests[0].marks.received - _BEFORE_S, self.instances(asked)
        arrivals = [one.arrival(begin) for one in requests]
        one, pace, tokens = found[0], found[0].pace, found[0].block_tokens or 16
        spec = WorkerSpec(
            cost=StepCost(pace.base_ms / 1000, pace.row_ms / 1000, pace.prompt_token_ms / 1000),
            slots=one.max_running,
            kv_tokens=one.kv_blocks * tokens or one.max_running * one.context_tokens,
            step_tokens=one.max_step_tokens,
            min_start_s=one.min_start_ms / 1000,
            noise=0.0,
        )
        told = {name: value for name, value in self.settings.items() if name != "telemetry"}
        until = max(asked.deadline_at, asked.marks.ended) - begin
        run = simulate(
            arrivals,
            Fleet(spec, len(found) + more, one.context_tokens, tokens),
            cast("dict[str, str]", told),
            seed=1,
            kept=requests.index(asked) if let_in else None,
            linger_s=max(0.0, until - arrivals[-1].at_s) + 0.5,
        )
        return {one.id: again.met for one, again in zip(requests, run.results, strict=False)}


def told(recorded: Recorded, asked: RecordedRequest) -> Iterator[str]:
    """What was found, in words."""
    came = asked.marks.received
    yield (
        f"{asked.id}: {asked.outcome} at {asked.ended - came:.3f} s of"
        f" {asked.deadline_at - came:.3f} s, with {asked.tokens} tokens."
    )
    again = recorded.replay(asked) if recorded.instances(asked) else {}
    if asked.id not in again:
        yield "It could not be replayed: no instance of its model is recorded, or it did not end."
        return
    if again[asked.id]:
        yield "Replayed, it is met: what kept it from that is not in what is recorded."
    else:
        changes = {
            "to be let in and not given up before its deadline": recorded.replay(
                asked, let_in=True
            ),
            "one more instance": recorded.replay(asked, more=1),
            "nobody else beside it": recorded.replay(asked, alone=True),
        }
        met = [name for name, run in changes.items() if run.get(asked.id)]
        yield f"This alone would have met it: {'; '.join(met) or 'nothing that was tried'}."
    others = [one for one in recorded.around(asked) if one.outcome in (Outcome.MET, *_MISSES)]
    same = sum((one.outcome is Outcome.MET) is again.get(one.id) for one in others)
    yield f"Of {len(others)} requests, {same} are met or not in the replay as they were."


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--request", required=True, metavar="ID")
    args = parser.parse_args(argv)
    try:
        recorded = Recorded.read(args.file.read_bytes())
    except (OSError, LookupError, TypeError, msgspec.MsgspecError) as error:
        parser.error(f"{args.file}: {error}")
    name = task_id_of(args.request)
    asked = next((one for one in recorded.requests if one.id == name), None)
    if asked is None or asked.outcome not in _MISSES:
        what = "is not there" if asked is None else f"missed nothing: {asked.outcome}"
        print(f"{name} {what}", file=sys.stderr)
        return 1
    print("\n".join(told(recorded, asked)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
