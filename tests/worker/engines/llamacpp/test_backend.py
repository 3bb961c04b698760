"""Continuous batching over llama.cpp's sequences, with a stand-in for llama.cpp."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from protocol import AbortCause, Code, FinishReason, Pooling, Sampling
from worker.core import Clock, Job
from worker.engines.backend import Produced
from worker.engines.llamacpp.backend import LlamaBackend, LlamaCppLimits
from worker.engines.llamacpp.model import Context, OutOfCells, Piece, StepAborted
from worker.engines.llamacpp.sequences import Sequences
from worker.errors import ContextOverflow, InvalidCall
from worker.sampling.sampler import Sampler

VOCABULARY = 64
EOS = 63


class FakeContext:
    """After token n comes n + 1. Knows what each sequence holds, and minds its positions."""

    sequence_cells = 100
    batch_tokens = 16

    def __init__(self) -> None:
        self.held_tokens: dict[int, list[int]] = {}
        self.steps: list[list[Piece]] = []
        self.before: Callable[[Sequence[Piece]], None] = lambda pieces: None
        self.stopped = False
        self.closed = False

    def compute(self, pieces: Sequence[Piece]) -> NDArray[np.float32]:
        self.before(pieces)
        self.steps.append(list(pieces))
        assert 0 < sum(len(piece.tokens) for piece in pieces) <= self.batch_tokens
        logits = []
        for piece in pieces:
            held = self.held_tokens.setdefault(piece.sequence, [])
            assert len(held) == piece.start and piece.tokens
            held += piece.tokens
            if piece.wants_logits:
                logits.append(np.eye(VOCABULARY, dtype=np.float32)[held[-1] + 1])
        return np.array(logits, np.float32).reshape(-1, VOCABULARY)

    def stop(self, wanted: bool) -> None:
        self.stopped = wanted

    def cut(self, sequence: int, length: int) -> bool:
        del self.held_tokens.setdefault(sequence, [])[length:]
        return True

    def copy(self, source: int, target: int, length: int) -> None:
        self.held_tokens[target] = self.held_tokens[source][:length]

    def held(self, sequence: int) -> int:
        return len(self.held_tokens.get(sequence, []))

    def close(self) -> None:
        self.closed = True


class Rig:
    """A backend of 4 sequences that share 100 cells."""

    def __init__(
        self,
        cells: int = 100,
        reuse: bool = True,
        stall_s: float = 10.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self.context = FakeContext()
        self.sequences = Sequences(4, cells, unified=True, reuse=reuse)
        sampler = Sampler(
            [EOS], torch.device("cpu"), slots=4, vocab_size=VOCABULARY, max_tokens=cells
        )
        self.backend = LlamaBackend(
            cast(Context, self.context),
            self.sequences,
            sampler,
            LlamaCppLimits(block_tokens=4, max_step_tokens=16, max_stall_s=stall_s),
            clock,
        )
        self.jobs: dict[int, Job] = {}
        self.texts: dict[int, list[int]] = {}
        self.ends: dict[int, Produced] = {}

    def add(
        self, prompt: Sequence[int], most: int, deadline: float = math.inf, **asked: object
    ) -> int:
        sampling = Sampling(max_tokens=most, temperature=0.0, **asked)  # type: ignore[arg-type]
        job = Job(list(prompt), sampling, deadline)
        handle = len(self.jobs) + 1
        self.backend.add(handle, job, most)
        self.jobs[handle] = job
        return handle

    def step(self) -> Sequence[Produced]:
        produced = self.backend.step(0.0)
        for one in produced:
            self.texts.setdefault(one.handle, []).extend(one.ids)
            if one.end is not None:
                assert one.handle not in self.ends
                self.ends[one.handle] = one
        self.sequences.check_integrity()
        for slot in self.sequences.slots:
            assert self.context.held_tokens.get(slot.index, []) == slot.tokens
        return produced

    def finish(self) -> None:
        for _ in range(200):
            if len(self.ends) == len(self.jobs):
                return
            self.step()
        raise AssertionError("not all jobs ended")


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.backend.close()


def test_texts_of_any_length_run_side_by_side_and_end_by_their_own_rules(rig: Rig) -> None:
    long = rig.add(range(1, 30), 5)  # more than one step's tokens
    short = rig.add([40], 3)
    ending = rig.add([60], 9)
    rig.finish()
    assert rig.texts[long] == [30, 31, 32, 33, 34]
    assert rig.texts[short] == [41, 42, 43]
    assert rig.texts[ending] == [61, 62, EOS]
    assert rig.ends[long].end is rig.ends[short].end is FinishReason.LENGTH
    assert rig.ends[ending].end is FinishReason.STOP
    assert max(len(step) for step in rig.context.steps) == 3
    load = rig.backend.load()
    assert load.running == load.waiting == load.kv_blocks_used == 0
    assert load.kv_blocks_total == 25 and load.prompt_tokens_total == 31


def test_decodes_come_before_prompts_in_a_step(rig: Rig) -> None:
    rig.add([1], 30)
    rig.step()
    rig.add(range(10, 40), 1)
    rig.step()
    first, second = rig.context.steps[-1]
    assert (first.sequence, len(first.tokens), first.wants_logits) == (0, 1, True)
    assert (second.sequence, len(second.tokens), second.wants_logits) == (1, 15, False)


def test_prompts_lengthen_a_step_by_no_more_than_a_stall() -> None:
    now = 0.0

    def take_2_ms_a_token(pieces: Sequence[Piece]) -> None:
        nonlocal now
        now += 0.002 * sum(len(piece.tokens) for piece in pieces)

    rig = Rig(stall_s=0.005, clock=lambda: now)
    rig.context.before = take_2_ms_a_token
    rig.add([1], 40)
    for _ in range(6):
        rig.step()
    rig.add(range(10, 50), 1)
    for _ in range(3):  # one step alone may be an accident
        rig.step()
    pieces = [len(piece.tokens) for step in rig.context.steps for piece in step]
    assert min(pieces[-3:]) == 1 and max(pieces[-1:]) == 8  # the least that is worth a step
    rig.backend.close()


def test_what_waits_for_cells_starts_when_there_are_some(rig: Rig) -> None:
    first = rig.add([1], 60)
    second = rig.add([2], 60)
    rig.step()
    load = rig.backend.load()
    assert (load.running, load.waiting) == (1, 1)
    rig.backend.abort([first])
    rig.ends[first] = Produced(first)
    rig.finish()
    assert len(rig.texts[second]) == 60


def test_what_is_given_up_frees_its_cells_at_once(rig: Rig) -> None:
    running, waiting = rig.add([1], 90), rig.add([2], 90)
    rig.step()
    rig.backend.abort([running, waiting, 99])
    load = rig.backend.load()
    assert load.running == load.waiting == load.kv_blocks_used == 0
    assert not rig.step()


def test_a_prompt_that_is_known_is_not_computed_again(rig: Rig) -> None:
    prompt = list(range(1, 13))
    rig.add(prompt, 2)
    rig.finish()
    again = rig.add([*prompt, 13, 14], 3)
    begun = rig.step()
    assert begun[0].cached_tokens == 13  # the prompt, and the first of the answer's two
    rig.finish()
    assert rig.texts[again] == [15, 16, 17]
    load = rig.backend.load()
    assert load.prompt_tokens_total == 13 and load.hit_blocks_total == 3


def test_a_running_text_s_head_is_shared(rig: Rig) -> None:
    prompt = list(range(1, 13))
    rig.add(prompt, 20)
    rig.step()
    other = rig.add([*prompt, 40], 2)
    rig.finish()
    assert rig.texts[other] == [41, 42]
    assert [len(p.tokens) for p in rig.context.steps[1]] == [1, 1]


def test_without_the_prefix_cache_nothing_stays() -> None:
    rig = Rig(reuse=False)
    rig.add([1, 2, 3], 2)
    rig.finish()
    assert not any(rig.context.held_tokens.values())
    rig.backend.close()


def test_a_stopped_step_costs_nobody_a_token(rig: Rig) -> None:
    """As when its jobs were given up, and one of them was not after all."""
    handle = rig.add(range(1, 9), 4)
    rig.step()

    def stop(pieces: Sequence[Piece]) -> None:
        rig.context.before = lambda pieces: None
        rig.context.compute(pieces)  # all of it is in the cells already
        raise StepAborted

    rig.context.before = stop
    assert not rig.step()
    rig.finish()
    assert rig.texts[handle] == [9, 10, 11, 12]


def test_llama_cpp_is_told_when_all_jobs_of_a_step_are_given_up(rig: Rig) -> None:
    handle = rig.add([1], 4)
    seen = []

    def cancel(pieces: Sequence[Piece]) -> None:
        rig.jobs[handle].abort = AbortCause.CANCEL
        rig.backend.interrupt()
        patience = time.monotonic() + 10
        while not rig.context.stopped and time.monotonic() < patience:
            time.sleep(0.001)
        seen.append(rig.context.stopped)
        raise StepAborted

    rig.context.before = cancel
    assert not rig.step()
    assert seen == [True] and not rig.context.stopped


def test_a_text_that_is_not_finite_ends_and_is_no_head_of_another(rig: Rig) -> None:
    """WK-12."""
    compute = rig.context.compute

    def with_nan(pieces: Sequence[Piece]) -> NDArray[np.float32]:
        logits = compute(pieces)
        for row, piece in enumerate(one for one in pieces if one.wants_logits):
            if 40 in rig.context.held_tokens[piece.sequence]:
                logits[row, 3] = np.nan
        return logits

    rig.context.compute = with_nan  # type: ignore[method-assign]
    sound, spoilt = rig.add([1, 2, 3], 6), rig.add([10, 11, 12, 40], 6)
    rig.finish()
    assert rig.ends[spoilt].code is Code.NOT_FINITE and not rig.texts[spoilt]
    assert rig.texts[sound] == [4, 5, 6, 7, 8, 9]
    after = rig.add([10, 11, 12, 13], 2)
    rig.finish()
    assert rig.texts[after] == [14, 15]
    assert rig.context.steps[-2][-1].start == 0, "nothing of it is taken for known"


def test_idle_texts_give_way_when_llama_cpp_finds_no_cells(rig: Rig) -> None:
    rig.add([1, 2, 3], 2)
    rig.finish()
    handle = rig.add([50], 2)

    def full(pieces: Sequence[Piece]) -> None:
        rig.context.before = lambda pieces: None
        raise OutOfCells

    rig.context.before = full
    rig.finish()
    assert rig.texts[handle] == [51, 52]
    assert not rig.sequences.slots[0].tokens
    rig.add([50], 2)
    rig.context.before = full
    rig.sequences.forget_idle()
    for slot in rig.sequences.slots:
        rig.context.cut(slot.index, 0)
    with pytest.raises(OutOfCells):
        rig.step()


def test_what_it_cannot_do_is_refused(rig: Rig) -> None:
    with pytest.raises(
        ContextOverflow, match="102 tokens, but this model's maximum context length is 100 tokens"
    ):
        rig.add([1, 2], 100)
    with pytest.raises(InvalidCall, match="prompts"):
        rig.add([1, 2], 1, prompt_logprobs=0)
    with pytest.raises(InvalidCall, match="embeddings"):
        rig.backend.add(9, Job([1], Sampling(max_tokens=1), math.inf, pooling=Pooling.LAST), 1)
    assert not rig.step()


def test_an_interrupt_ends_the_wait(rig: Rig) -> None:
    rig.backend.interrupt()
    began = time.monotonic()
    assert not rig.backend.step(60.0)
    assert time.monotonic() - began < 30


def test_closing_twice_is_closing_once(rig: Rig) -> None:
    rig.add([1], 5)
    rig.backend.close()
    rig.backend.close()
    assert rig.context.closed
