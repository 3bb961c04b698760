"""Texts of a model that has never seen JSON match what was asked for all the same."""

import json
import re
from pathlib import Path

import pytest

from protocol import AbortCause, Code, FinishReason, Grammar, GrammarKind, Sampling
from tests.support.checkpoints import DEMO
from tests.support.engine import end_of, ids_of
from tests.support.worker_constants import constants_among
from worker.core import Event, Job
from worker.engine.build import build_engine
from worker.engine.engine import Engine
from worker.loaded import LoadedEngine
from worker.settings import WorkerSettings
from worker.text import TextStream

FAR = 1e12
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["°C", "°F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "tags": {"type": "array", "items": {"enum": ["wet", "dry"]}, "maxItems": 2},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def loaded() -> LoadedEngine:
    return build(DEMO)


def build(path: Path) -> LoadedEngine:
    settings = WorkerSettings(model_path=path, device="cpu", max_running=8, max_step_tokens=64)
    with constants_among({"block_tokens": 4}):
        return build_engine(settings)


def job(loaded: LoadedEngine, grammar: Grammar | None, begun: int = 0, **changes: object) -> Job:
    assert loaded.grammars is not None
    ids = loaded.tokenizer.encode("Once upon a time")
    sampling = Sampling(**({"max_tokens": 240, "temperature": 0.9, "seed": 1} | changes))  # type: ignore[arg-type]
    constraint = None if grammar is None else loaded.grammars.constraint(grammar)
    return Job(ids, sampling, FAR, constraint=constraint)


def run(loaded: LoadedEngine, jobs: list[Job]) -> list[Event]:
    engine = loaded.engine
    assert isinstance(engine, Engine)
    for one in jobs:
        engine.submit(one)
    events: list[Event] = []
    while engine.scheduler.has_work or not events:
        events += engine.step()
        engine.scheduler.check_integrity()
    assert engine.scheduler.pool.used_count == 0
    return events


def text_of(loaded: LoadedEngine, one: Job, events: list[Event]) -> str:
    stream = TextStream(loaded.tokenizer.detokenizer())
    return "".join(stream.feed(ids_of(one, events)).texts) + stream.flush()[0]


def schema(value: object, **changes: bool) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value), **changes)


def check_weather(text: str) -> None:
    value = json.loads(text)
    assert set(value) - {"tags"} == {"city", "unit", "days"}
    assert isinstance(value["city"], str) and len(value["city"]) <= 12
    assert value["unit"] in ("°C", "°F")
    assert isinstance(value["days"], int) and 1 <= value["days"] <= 14
    assert all(tag in ("wet", "dry") for tag in value.get("tags", [])[:3])


def test_schemas_hold_next_to_free_rows(loaded: LoadedEngine) -> None:
    """Whatever else is asked of the sampler; rows without a grammar get what they always do."""
    alone = job(loaded, None, temperature=0.0, max_tokens=24)
    expected = ids_of(alone, run(loaded, [alone]))
    free = job(loaded, None, temperature=0.0, max_tokens=24)
    ways = [
        {},
        {"temperature": 0.0},
        {"temperature": 2.0, "top_k": 5},
        {"top_p": 0.5, "repetition_penalty": 1.3},
        {"logit_bias": ((1, 100.0),), "logprobs": 2},
        {"min_tokens": 100, "seed": 9},
    ]
    jobs = [job(loaded, schema(WEATHER), **way) for way in ways]
    events = run(loaded, [free, *jobs])
    assert ids_of(free, events) == expected
    finished = 0
    for one in jobs:
        if end_of(one, events).reason is FinishReason.STOP:
            finished += 1
            check_weather(text_of(loaded, one, events))
        else:
            assert end_of(one, events).reason is FinishReason.LENGTH
    assert finished >= 4


def test_a_schema_holds_behind_what_may_stand_before_it(loaded: LoadedEngine) -> None:
    """As a model's thinking, whose text is free; next to a job with the same schema alone."""
    before = 'before: "<think>" /[a-z ]{4,12}/ "</think>\\n\\n"\n'
    thinks = job(loaded, schema(WEATHER).behind(before), max_tokens=300)
    plain = job(loaded, schema(WEATHER), max_tokens=300)
    events = run(loaded, [thinks, plain])
    assert end_of(thinks, events).reason is end_of(plain, events).reason is FinishReason.STOP
    thought, _, answer = text_of(loaded, thinks, events).partition("</think>\n\n")
    assert re.fullmatch(r"<think>[a-z ]{4,12}", thought)
    check_weather(answer)
    check_weather(text_of(loaded, plain, events))


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar(GrammarKind.REGEX, r"[A-Z]{3}-\d{2,4}"), r"[A-Z]{3}-\d{2,4}"),
        (
            Grammar(GrammarKind.CHOICE, '["yes", "no / \\"maybe\\"", "日本"]'),
            '(yes|no / "maybe"|日本)',
        ),
        (Grammar(GrammarKind.LARK, 'start: "a" "b" start | "c" "d"?'), "(ab)*cd?"),
        (Grammar(GrammarKind.LARK, 'root ::= "x" num\nnum ::= [0-9] | [0-9] [0-9]'), r"x\d{1,2}"),
    ],
    ids=["regex", "choice", "lark", "gbnf"],
)
def test_texts_of_every_kind(loaded: LoadedEngine, grammar: Grammar, pattern: str) -> None:
    jobs = [job(loaded, grammar, seed=seed) for seed in range(2)]
    events = run(loaded, jobs)
    for one in jobs:
        assert end_of(one, events).reason is FinishReason.STOP
        assert re.fullmatch(pattern, text_of(loaded, one, events))


def test_a_begun_text_goes_on_where_it_stopped(loaded: LoadedEngine) -> None:
    whole = job(loaded, schema(WEATHER))
    events = run(loaded, [whole])
    ids = ids_of(whole, events)
    assert end_of(whole, events).reason is FinishReason.STOP
    assert loaded.grammars is not None
    rest = Job(
        [*whole.token_ids, *ids[:7]],
        whole.sampling,
        FAR,
        constraint=loaded.grammars.constraint(schema(WEATHER), ids[:7]),
    )
    assert ids_of(rest, run(loaded, [rest])) == ids[7:]
    other = Job(whole.token_ids, whole.sampling, FAR)
    other.constraint = loaded.grammars.constraint(schema(WEATHER), [ids[-1], ids[-1]])
    assert end_of(other, run(loaded, [other])).code is Code.INVALID_REQUEST


@pytest.mark.parametrize(
    "grammar",
    [
        schema({"type": "strin"}),
        schema({"type": "array", "uniqueItems": True}),
        schema({"$ref": "#"}),
        schema({"type": "integer", "multipleOf": 9973 * 9967}),
        schema({"allOf": [{"multipleOf": one} for one in (97, 89, 83)]}),
        schema({"type": "string", "pattern": "^(([a-z]{1,100}){1,100}){1,100}$"}),
        Grammar(GrammarKind.JSON_SCHEMA, "{"),
        Grammar(GrammarKind.JSON_SCHEMA, '{"a":' * 20_000),
        Grammar(GrammarKind.REGEX, "(a"),
        Grammar(GrammarKind.REGEX, "((((a{1,50}){1,50}){1,50}){1,50}){1,50}"),
        Grammar(GrammarKind.LARK, "start: " + "(" * 5000 + '"a"' + ")" * 5000),
        Grammar(GrammarKind.LARK, "start: start"),
        Grammar(GrammarKind.CHOICE, "[]"),
        Grammar(GrammarKind.STRUCTURAL_TAG, "{}"),
    ],
)
def test_a_hostile_grammar_costs_its_sender_only(loaded: LoadedEngine, grammar: Grammar) -> None:
    """It ends with what is wrong, at once or at a step; a job next to it gets its text."""
    beside = Grammar(GrammarKind.CHOICE, '["yes", "no"]')
    jobs = [job(loaded, grammar, max_tokens=40), job(loaded, beside)]
    events = run(loaded, jobs)
    end = end_of(jobs[0], events)
    assert end.code is Code.INVALID_REQUEST and end.message
    assert text_of(loaded, jobs[1], events) in ("yes", "no")


def test_masks_that_take_long_end_their_own_job(
    loaded: LoadedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.grammar.constraint.LONG_MASK_S", -1.0)
    monkeypatch.setattr("worker.grammar.constraint.MAX_OVERRUN_S", 5.0)
    slow, free = job(loaded, Grammar(GrammarKind.REGEX, "x{200}")), job(loaded, None, max_tokens=9)
    events = run(loaded, [slow, free])
    assert end_of(slow, events).code is Code.INVALID_REQUEST
    assert "too much work" in end_of(slow, events).message
    assert end_of(free, events).reason in (FinishReason.LENGTH, FinishReason.STOP)


def test_what_cannot_be_enforced_may_be_passed_over(loaded: LoadedEngine) -> None:
    one = job(loaded, schema({"enum": [[1]], "uniqueItems": True}, lenient=True))
    events = run(loaded, [one])
    assert json.loads(text_of(loaded, one, events)) == [1]


def test_who_waits_for_a_grammar_holds_nobody_up(loaded: LoadedEngine) -> None:
    """Others run meanwhile; cancel and deadline count."""
    engine = loaded.engine
    assert isinstance(engine, Engine)
    from worker.grammar.constraint import Constraint

    never = [Job([5, 6], Sampling(max_tokens=4), FAR, constraint=Constraint()) for _ in range(2)]
    for one in never:
        engine.submit(one)
    other = job(loaded, None, max_tokens=4)
    engine.submit(other)
    events: list[Event] = []
    while not any(event.job is other and ids_of(other, events) for event in events):
        events += engine.step()
    never[0].deadline = 0.0
    engine.cancel(never[1], AbortCause.CANCEL)
    events += engine.step()
    assert end_of(never[0], events).reason is FinishReason.DEADLINE
    assert end_of(never[1], events).reason is FinishReason.CANCELLED
    while engine.scheduler.has_work:
        events += engine.step()
