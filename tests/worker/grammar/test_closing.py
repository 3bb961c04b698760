"""Texts that come to a whole end as their deadline nears (DL-23), by their own pace."""

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from protocol import FinishReason, Grammar, GrammarKind, OnDeadline, Sampling
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
from worker.engine.expiry import ExpiryCheck
from worker.grammar import closing
from worker.grammar.closing import Closing, ClosingTables
from worker.grammar.constraint import Constraint
from worker.loaded import LoadedEngine
from worker.scheduler.request import Request
from worker.scheduler.step_time import StepTime

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
        self, steps: float | None, seed: int, grammar: Grammar | None = None, **changes: object
    ) -> Job:
        """A job that has about so many steps; None for one without a deadline."""
        closing, constraint = None, None
        asked = {"max_tokens": 400, "temperature": 0.8, "seed": seed} | changes
        if steps is not None:
            deadline, most = self.clock.now() + steps * STEP_S, asked["max_tokens"]
            source = "" if grammar is None else grammar.text
            closing = Closing(self.tables, deadline, self.clock.now, most, source)  # type: ignore[arg-type]
        if grammar is not None:
            assert self.loaded.grammars is not None
            constraint = self.loaded.grammars.constraint(grammar, closing=closing)
        elif closing is not None:
            constraint = Constraint(closing)
            constraint.resolve(None)
        ids = self.loaded.tokenizer.encode("Once upon a time")
        return Job(ids, Sampling(**asked), FAR, constraint=constraint)  # type: ignore[arg-type]

    def run(self, jobs: Sequence[Job], step_s: Callable[[int], float] | None = None) -> list[Event]:
        engine = self.loaded.engine
        assert isinstance(engine, Engine)
        for job in jobs:
            while job.constraint and not job.constraint.is_ready:
                time.sleep(0.001)  # or the deadline would come closer while grammars are compiled
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


def test_steps_that_become_slow_are_allowed_for(loaded: LoadedEngine) -> None:
    of = Steps(loaded)
    job = of.job(100, 4)
    began = of.clock.now()
    events = of.run([job], lambda number: STEP_S if number < 30 else 3 * STEP_S)
    assert text_of(loaded, job, events).rstrip().endswith(SENTENCE_ENDS)
    assert of.clock.now() - began <= 100 * STEP_S


def test_dl23_json_parses_against_its_schema_in_time(loaded: LoadedEngine) -> None:
    of, steps = Steps(loaded), 60
    jobs = [of.job(steps, seed, schema(WEATHER), temperature=1.2) for seed in range(5)]
    events = of.run(jobs)
    for job in jobs:
        check_weather(text_of(loaded, job, events))
        assert len(ids_of(job, events)) <= steps


def test_a_value_is_whole_within_max_tokens_without_any_word_of_a_deadline(
    loaded: LoadedEngine,
) -> None:
    of, max_tokens = Steps(loaded), 60
    changes: dict[str, object] = {"temperature": 1.2, "max_tokens": max_tokens}
    jobs = [of.job(math.inf, seed, schema(WEATHER), **changes) for seed in range(5)]
    events = of.run(jobs)
    for job in jobs:
        check_weather(text_of(loaded, job, events))
        assert len(ids_of(job, events)) <= max_tokens
        # Parsers of OpenAI's SDKs refuse what has ended by its length.
        assert end_of(job, events).reason is FinishReason.STOP
        assert job.constraint is not None and not job.constraint.has_closed


HEX, WORDS = "0x[0-9a-f]+;", "([a-z]+ )+end"
ROUND: Mapping[str, Grammar] = {
    **{
        said: schema({"type": "object", "properties": {"v": value}, "required": ["v"]})
        for said, value in {
            f'{{"v":"{HEX}"}}': {"type": "string", "pattern": f"^{HEX}$"},
            f'{{"v":"{WORDS}"}}': {"type": "string", "pattern": f"^{WORDS}$"},
            r'{"v":"\d+-\d+"}': {"type": "string", "pattern": r"^\d+-\d+$"},
            r'{"v":"P[\dYMWDTHS]+"}': {"type": "string", "format": "duration"},
            f'{{"v":\\["{HEX}","{HEX}"\\]}}': {
                "type": "array",
                "items": {"type": "string", "pattern": f"^{HEX}$"},
                "minItems": 2,
                "maxItems": 2,
            },
        }.items()
    },
    **{
        said: Grammar(GrammarKind.REGEX, said)
        for said in (
            r"\d{3,}-\d{2,}x",
            r"\w+@\w+\.com",
            WORDS,
            "([A-Z][a-z]+ )+stop!",
            "(a+b)+c",
            "[äöü]+é",
        )
    },
    **{
        said: Grammar(GrammarKind.LARK, text)
        for said, text in {
            "a+b": 'start: "a"+ "b"',
            r"\d+!": 'start: NUM "!"\nNUM: /[0-9]+/',
            r"([a-z]+ )+\.": 'start: w+ "."\nw: /[a-z]+ /',
            "([a-z]+ )+the end": 'start: (WORD " ")+ "the end"\nWORD: /[a-z]+/',
        }.items()
    },
}
"""Grammars by the texts they allow, where the shortest token may be taken again for ever."""


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One for each mask that searches take."""
    made: list[object] = []
    fill = closing._fill

    def counted(*args: Any) -> bool:
        made.append(None)
        return fill(*args)

    monkeypatch.setattr(closing, "_fill", counted)
    return made


def test_what_may_go_round_for_ever_is_whole_within_max_tokens(
    loaded: LoadedEngine, masks: list[object]
) -> None:
    of = Steps(loaded)
    jobs = {
        said: [
            of.job(math.inf, seed, ROUND[said], temperature=1.2, max_tokens=32) for seed in (0, 1)
        ]
        for said in ROUND
    }
    events = of.run([job for both in jobs.values() for job in both])
    for said, both in jobs.items():
        for job in both:
            text = text_of(loaded, job, events)
            assert re.fullmatch(said, text) and end_of(job, events).reason is FinishReason.STOP, (
                text
            )
    assert len(masks) < 100 * 32 * 2 * len(ROUND), "a search takes too long"


def test_searches_in_vain_are_rare(loaded: LoadedEngine, masks: list[object]) -> None:
    of, grammar = Steps(loaded), schema({"type": "string", "minLength": 4000})
    job = of.job(math.inf, 0, grammar, max_tokens=100)
    assert end_of(job, of.run([job])).reason is FinishReason.LENGTH
    assert 500 < len(masks) < 80 * 100


def test_free_text_that_matches_is_not_shortened(loaded: LoadedEngine) -> None:
    of = Steps(loaded)
    free = Grammar(GrammarKind.REGEX, "(.|\n)*")
    changes: dict[str, object] = {"max_tokens": 30, "temperature": 0.0}
    plain, held = of.job(None, 1, **changes), of.job(math.inf, 1, free, **changes)
    assert ids_of(held, of.run([held])) == ids_of(plain, of.run([plain]))


def test_no_element_is_begun_that_would_not_be_done_in_time(loaded: LoadedEngine) -> None:
    """As a comma may be drawn where a bracket would do, and then both strings are needed."""
    of = Steps(loaded)
    item = {
        "type": "object",
        "properties": {"place": {"type": "string"}, "is_far": {"type": "boolean"}},
        "required": ["place", "is_far"],
        "additionalProperties": False,
    }
    places = {"type": "array", "items": item, "minItems": 1}
    jobs = [
        of.job(4000, seed, schema(places), temperature=1.5, max_tokens=70) for seed in range(24)
    ]
    events = of.run(jobs)
    values = [json.loads(text_of(loaded, job, events)) for job in jobs]
    told = [place["is_far"] for value in values for place in value]
    assert True in told and False in told, "the model no longer chooses"


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


# ── next to others' prompts ───────────────────────────────────────────────────────────────────

STORY = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 8},
        "scenes": {
            "type": "array",
            "minItems": 2,
            "items": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "text": {"type": "string"}},
                "required": ["place", "text"],
            },
        },
        "sad": {"type": "boolean"},
    },
    "required": ["title", "scenes", "sad"],
}
ENDS = (1, 5)
"""The model's end tokens."""
PLAIN_S, PROMPT_TOKEN_S, PROMPT_EVERY_S = 0.02, 0.0008, 1.0


class Busy:
    """An engine's view of one text, in steps of 20 ms and of 180 that have others' prompts."""

    def __init__(self, loaded: LoadedEngine, seed: int) -> None:
        self.clock = ManualClock()
        self.draw = np.random.default_rng(seed)
        self.step_time = StepTime()
        self.expiry = ExpiryCheck(self.clock.now, self.step_time, steps_in_flight=1)
        self.pieces = Steps(loaded).tables.piece_of
        self.vocab_size = loaded.card.vocab_size
        self.prompt_at = 0.0
        for _ in range(200):
            self.step()

    def step(self) -> None:
        prompt = self.next_prompt()
        if prompt:
            self.prompt_at = self.clock.now() + self.draw.exponential(PROMPT_EVERY_S)
        took_s = (PLAIN_S + PROMPT_TOKEN_S * prompt) * self.draw.lognormal(0.0, 0.1)
        self.step_time.decoded(took_s, 1, rows=4, prompt_tokens=prompt)
        self.step_time.prefilled(took_s, prompt)
        self.clock.advance(took_s)

    def next_prompt(self) -> int:
        return 200 if self.clock.now() >= self.prompt_at else 0

    def write(self, job: Job) -> str:
        """The text until it ends, or is cut."""
        request = Request(job, submitted_at=0.0, own_seed=1)
        text: list[int] = []
        words = np.zeros(-(-self.vocab_size // 32), np.uint32)
        end = words.copy()
        end[0] = sum(1 << token for token in ENDS)
        assert job.constraint is not None
        while not self.expiry.expired([request], self.clock.now(), self.next_prompt):
            job.constraint.advance(text)
            job.constraint.fill(words, end)
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")
            token = int(self.draw.choice(np.flatnonzero(bits)))
            self.step()
            if token in ENDS:
                break
            text.append(token)
        return b"".join(map(self.pieces, text)).decode(errors="replace")


def test_dl23_a_value_is_whole_though_others_prompts_make_steps_slow(loaded: LoadedEngine) -> None:
    """The engine cuts a text well before its deadline while a prompt waits for the next step."""
    of = Steps(loaded)
    assert loaded.grammars is not None
    for seed in range(0, 24, 3):
        busy = Busy(loaded, seed)
        deadline = busy.clock.now() + 3.5 + seed / 6
        closing = Closing(of.tables, deadline, busy.clock.now)
        constraint = loaded.grammars.constraint(schema(STORY), closing=closing)
        while not constraint.is_ready:
            time.sleep(0.001)
        job = Job([2], Sampling(max_tokens=400), deadline, OnDeadline.FINISH, constraint=constraint)
        assert set(json.loads(busy.write(job))) == {"title", "scenes", "sad"}
        assert busy.clock.now() <= deadline
