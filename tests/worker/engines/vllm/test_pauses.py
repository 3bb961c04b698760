"""Pauses, and texts that others began, on the real vLLM.

With its first model runner, which CPUs have, and in ``test_as_on_cuda`` with its second one.
"""

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer

from protocol import AbortCause, Code, Grammar, GrammarKind, Sampling
from tests.support import real_vllm
from tests.support.checkpoints import DEMO
from tests.support.engine import end_of, ids_of
from tests.support.real_vllm import FAR, engine_of, finish, loaded_by_vllm
from worker.core import Event, Job, JobPaused, JobResumed
from worker.engine.loop import EngineLoop
from worker.engines.stepped import SteppedBackend
from worker.engines.vllm.backend import VllmCore
from worker.loaded import LoadedEngine

pytestmark = real_vllm.MARKS

SAMPLED = {"temperature": 1.5, "top_k": 2, "seed": 11, "ignore_eos": True}
LOOKING_BACK = SAMPLED | {"frequency_penalty": 0.6, "repetition_penalty": 1.2}
MIN_TOKENS = {"temperature": 0.0, "min_tokens": 18}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "sampled": SAMPLED,
    "penalties": LOOKING_BACK,
    "min_tokens": MIN_TOKENS,
}
TOKENS = 24


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedEngine]:
    with loaded_by_vllm(DEMO, max_running=3) as loaded:
        yield loaded


@pytest.fixture
def engine(loaded: LoadedEngine) -> Iterator[EngineLoop]:
    """An engine that has nothing left at the end of a test."""
    engine = engine_of(loaded)
    assert isinstance(engine.backend, SteppedBackend)
    assert isinstance(engine.backend.core, VllmCore)
    yield engine
    core = engine.backend.core._core
    finish(engine, [job(loaded)])  # tells the runner of what has ended
    assert not core.scheduler.requests and not engine.backend.core._held._held
    assert (engine.stats().kv_blocks_used, engine.stats().running) == (0, 0)


def job(loaded: LoadedEngine, text: str = "What is a tide?", **asked: Any) -> Job:
    stated = {"max_tokens": TOKENS, "temperature": 0.0} | asked
    return Job(loaded.tokenizer.encode(text), Sampling(**stated), FAR)


def pausing(engine: EngineLoop, job: Job, *places: int) -> Callable[[list[Event]], None]:
    """Pauses a job once it has so many tokens, and resumes it a step after it was."""
    left = list(places)

    def look(events: list[Event]) -> None:
        if events.count(JobPaused(job)) > events.count(JobResumed(job)):
            engine.resume(job)
        elif left and len(ids_of(job, events)) >= left[0]:
            del left[0]
            engine.pause(job)

    return look


@pytest.mark.parametrize("kind", KINDS)
def test_a_paused_text_goes_on_with_the_same_tokens(
    engine: EngineLoop, loaded: LoadedEngine, kind: str
) -> None:
    assert loaded.card.can_pause
    alone = job(loaded, **KINDS[kind])
    expected = ids_of(alone, finish(engine, [alone]))
    paused = job(loaded, **KINDS[kind])
    others = [job(loaded, text, max_tokens=30) for text in ("hello", "Tide and time")]

    events = finish(engine, [paused, *others], pausing(engine, paused, 3, 11))
    assert events.count(JobPaused(paused)) == events.count(JobResumed(paused)) == 2
    assert ids_of(paused, events) == expected
    assert end_of(paused, events).code is None


def test_a_paused_text_holds_neither_slot_nor_blocks(
    engine: EngineLoop, loaded: LoadedEngine
) -> None:
    jobs = [job(loaded, max_tokens=40, ignore_eos=True) for _ in range(3)]
    for each in jobs:
        engine.submit(each)
    events: list[Event] = []
    while any(len(ids_of(each, events)) < 4 for each in jobs):
        events += engine.step()
    for each in jobs:
        engine.pause(each)
    while any(JobPaused(each) not in events for each in jobs):
        events += engine.step()
    assert (engine.stats().kv_blocks_used, engine.stats().running) == (0, 0)
    short = job(loaded, "hello", max_tokens=5, ignore_eos=True)
    engine.submit(short)
    while len(ids_of(short, events)) < 5:
        events += engine.step()
    told = {each: len(ids_of(each, events)) for each in jobs}
    assert max(told.values()) < 40
    engine.cancel(jobs[0], AbortCause.CANCEL)
    for each in jobs[1:]:
        engine.resume(each)
    events += finish(engine, [])
    assert end_of(jobs[0], events).code is Code.CANCELLED
    assert len(ids_of(jobs[0], events)) == told[jobs[0]]
    assert len(ids_of(jobs[1], events)) == len(ids_of(jobs[2], events)) == 40


def test_a_grammar_is_kept_to_over_a_pause(engine: EngineLoop, loaded: LoadedEngine) -> None:
    assert loaded.grammars is not None
    bound = job(loaded, max_tokens=40)
    bound.constraint = loaded.grammars.constraint(Grammar(GrammarKind.REGEX, "[0-9]{4}-[0-9]{2}"))

    events = finish(engine, [bound], pausing(engine, bound, 3))
    assert JobResumed(bound) in events and end_of(bound, events).code is None
    tokenizer = Tokenizer.from_str(loaded.card.tokenizer_json.decode())
    assert re.fullmatch("[0-9]{4}-[0-9]{2}", tokenizer.decode(ids_of(bound, events)))


def test_in_any_order_every_text_is_whole_and_ends_once(
    engine: EngineLoop, loaded: LoadedEngine
) -> None:
    kinds = [*KINDS.values(), KINDS["greedy"], KINDS["sampled"]]
    texts = ["hello", "What is a tide?", "The deadline", "Tide and time", "Once", "A b c d e f"]
    expected = []
    for text, kind in zip(texts, kinds, strict=True):
        one = job(loaded, text, **kind)
        expected.append(ids_of(one, finish(engine, [one])))
    for seed in range(4):
        rng = random.Random(seed)
        jobs = [job(loaded, text, **kind) for text, kind in zip(texts, kinds, strict=True)]
        unwanted = rng.choice(jobs)

        def look(events: list[Event], jobs: list[Job] = jobs, rng: random.Random = rng) -> None:
            one = rng.choice(jobs)
            rng.choice([engine.pause, engine.resume, engine.resume])(one)
            if len(ids_of(unwanted, events)) > 5:  # noqa: B023 - called in this round only
                engine.cancel(unwanted, AbortCause.CANCEL)  # noqa: B023

        events = finish(engine, jobs, look)
        for one, whole in zip(jobs, expected, strict=True):
            made, end = ids_of(one, events), end_of(one, events)
            assert made == whole[: len(made)]
            assert end.code is None or one is unwanted
            assert end.code is not None or made == whole
