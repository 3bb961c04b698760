"""Texts that come to a whole end as their deadline nears (DL-23), by their own pace."""

import json
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tests.support.clock import ManualClock
from tests.support.engine import end_of, ids_of
from tests.worker.grammar.test_constrained_texts import (
    FAR,
    WEATHER,
    check_weather,
    loaded,
    schema,
    text_of,
)
from worker.core import Event, Job
from worker.engine.engine import Engine
from worker.grammar.closing import Closing, ClosingTables, shortest_end
from worker.grammar.constraint import Constraint
from worker.loaded import LoadedEngine
from worker.protocol import FinishReason, Grammar, Sampling

__all__ = ["loaded"]

STEP_S = 0.01
SENTENCE_ENDS = (".", "!", "?", '."', '!"', '?"')


class Steps:
    """Runs jobs on an engine, each step of which takes ``STEP_S`` of the closings' time."""

    def __init__(self, loaded: LoadedEngine) -> None:
        self.loaded = loaded
        self.clock = ManualClock()
        pieces = loaded.tokenizer.pieces
        assert pieces is not None
        self.tables = ClosingTables(pieces.__getitem__, loaded.card.vocab_size)

    def job(
        self, steps: int | None, seed: int, grammar: Grammar | None = None, **changes: object
    ) -> Job:
        """A job that has about so many steps; None for one without a deadline."""
        closing, constraint = None, None
        if steps is not None:
            closing = Closing(self.tables, self.clock.now() + steps * STEP_S, self.clock.now)
        if grammar is not None:
            assert self.loaded.grammars is not None
            constraint = self.loaded.grammars.constraint(grammar, closing=closing)
        elif closing is not None:
            constraint = Constraint(closing)
            constraint.resolve(None)
        asked = {"max_tokens": 400, "temperature": 0.8, "seed": seed} | changes
        ids = self.loaded.tokenizer.encode("Once upon a time")
        return Job(ids, Sampling(**asked), FAR, constraint=constraint)  # type: ignore[arg-type]

    def run(self, jobs: Sequence[Job], step_s: Callable[[int], float] | None = None) -> list[Event]:
        engine = self.loaded.engine
        assert isinstance(engine, Engine)
        for job in jobs:
            engine.submit(job)
        events: list[Event] = []
        number = 0
        while engine.scheduler.has_work or not events:
            events += engine.step()
            number += 1
            self.clock.advance(STEP_S if step_s is None else step_s(number))
        return events


@pytest.mark.parametrize("steps", [40, 90])
def test_dl23_a_text_ends_with_a_sentence_in_time(loaded: LoadedEngine, steps: int) -> None:
    of = Steps(loaded)
    jobs = [of.job(steps, seed) for seed in range(6)]
    events = of.run(jobs)
    for job in jobs:
        text = text_of(loaded, job, events).rstrip()
        assert text.endswith(SENTENCE_ENDS), text
        assert len(ids_of(job, events)) <= steps
        assert end_of(job, events).reason is FinishReason.STOP
        # As long as there was time for, but for the last sentence.
        assert not job.constraint or not job.constraint.has_closed or len(text) > 2 * steps


def test_a_text_that_has_all_the_time_it_needs_is_as_ever(loaded: LoadedEngine) -> None:
    of = Steps(loaded)
    jobs = [of.job(steps, 3, max_tokens=60) for steps in (None, 10_000)]
    events = [of.run([job]) for job in jobs]
    assert ids_of(jobs[0], events[0]) == ids_of(jobs[1], events[1])
    assert jobs[1].constraint is not None and not jobs[1].constraint.has_closed


def test_steps_that_become_slow_are_allowed_for(loaded: LoadedEngine) -> None:
    of = Steps(loaded)
    job = of.job(100, 4)
    began = of.clock.now()
    events = of.run([job], lambda number: STEP_S if number < 30 else 3 * STEP_S)
    assert text_of(loaded, job, events).rstrip().endswith(SENTENCE_ENDS)
    assert of.clock.now() - began <= 100 * STEP_S


@pytest.mark.parametrize("steps", [60, 160])
def test_dl23_json_parses_against_its_schema_in_time(loaded: LoadedEngine, steps: int) -> None:
    of = Steps(loaded)
    jobs = [of.job(steps, seed, schema(WEATHER), temperature=1.2) for seed in range(5)]
    events = of.run(jobs)
    for job in jobs:
        check_weather(text_of(loaded, job, events))
        assert len(ids_of(job, events)) <= steps


def test_an_endless_list_is_closed_in_time(loaded: LoadedEngine) -> None:
    of = Steps(loaded)
    words = {"type": "array", "items": {"type": "string", "minLength": 3}, "minItems": 1}
    jobs = [of.job(120, seed, schema(words), temperature=1.0) for seed in range(4)]
    events = of.run(jobs)
    for job in jobs:
        value = json.loads(text_of(loaded, job, events))
        assert isinstance(value, list) and value
        assert len(ids_of(job, events)) <= 120


# ── by hand ──────────────────────────────────────────────────────────────────────────────────

VOCABULARY = [b"", b"a", b".", b"```", b"\n", b"1", b" ", b'"', b"``", b"`"]
END = np.array([1], np.uint32)


class Hand:
    """One text, written token by token, a second each."""

    def __init__(self, seconds: float) -> None:
        self.clock = ManualClock()
        tables = ClosingTables(VOCABULARY.__getitem__, len(VOCABULARY))
        self.closing = Closing(tables, self.clock.now() + seconds, self.clock.now)
        self.text: list[int] = []

    def write(self, *pieces: bytes) -> list[bytes]:
        """Write these, and return what may follow."""
        for piece in pieces:
            self.text.append(VOCABULARY.index(piece))
            self.clock.advance(1.0)
            self.closing.follow(self.text)
        words = np.array([(1 << len(VOCABULARY)) - 1], np.uint32)
        self.closing.restrict(words, END, None)
        return [piece for at, piece in enumerate(VOCABULARY) if words[0] >> at & 1]


def test_a_sentences_end_near_the_deadline_is_the_texts() -> None:
    hand = Hand(24)
    assert hand.write(b"a", b"a") == VOCABULARY
    assert hand.write(*[b"a"] * 12) == VOCABULARY
    assert hand.write(b".") == [b""]


def test_a_dot_behind_a_digit_is_no_end_yet() -> None:
    hand = Hand(24)
    assert hand.write(*[b"a"] * 12, b"1", b".") == VOCABULARY
    assert hand.write(b" ") == [b""]


def test_with_the_last_tokens_a_sentence_is_made_to_end() -> None:
    hand = Hand(24)
    assert hand.write(*[b"a"] * 19) == [b"."]
    assert hand.write(b".") == [b""]


def test_a_block_of_code_is_closed_first() -> None:
    hand = Hand(24)
    assert hand.write(b"```", *[b"a"] * 14, b".") == [b"\n"]
    assert hand.write(b"\n") == [b"```"]
    assert hand.write(b"```") == [b""]


def test_an_end_far_from_the_deadline_is_none() -> None:
    assert Hand(1000).write(*[b"a"] * 9, b".") == VOCABULARY


def test_the_way_to_an_end_is_short_and_matches(loaded: LoadedEngine) -> None:
    assert loaded.grammars is not None
    tables = Steps(loaded).tables
    constraint = loaded.grammars.constraint(schema(WEATHER))
    while not constraint.is_ready:
        pass
    matcher = constraint._matcher
    assert matcher is not None
    path = shortest_end(matcher, tables.closers, -(-loaded.card.vocab_size // 32))
    assert path is not None
    text = b"".join(tables.piece_of(token) for token in path).decode()
    check_weather(text)
    assert len(path) < 60
