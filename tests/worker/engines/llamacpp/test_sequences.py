"""Which job has which sequence, and what the idle ones still hold."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from worker.engines.llamacpp.sequences import Sequences, Taken


def pool(count: int = 3, cells: int = 30, *, unified: bool = True, reuse: bool = True) -> Sequences:
    return Sequences(count, cells, unified=unified, reuse=reuse)


def compute(taken: Taken | None, prompt: list[int]) -> Taken:
    assert taken is not None
    taken.slot.tokens[:] = prompt
    return taken


def test_cells_are_reserved_to_the_end() -> None:
    sequences = pool()
    first = compute(sequences.take([1, 2, 3], 20), [1, 2, 3])
    assert sequences.take([1, 2, 3], 11) is None
    assert sequences.reserved_cells == 20
    sequences.release(first.slot)
    assert sequences.take([4], 11) is not None


def test_no_more_jobs_than_sequences() -> None:
    sequences = pool()
    taken = [sequences.take([1], 2) for _ in range(3)]
    assert {one.slot.index for one in taken if one is not None} == {0, 1, 2}
    assert sequences.take([1], 2) is None


def test_a_conversation_goes_on_where_it_was() -> None:
    sequences = pool()
    first = compute(sequences.take([1, 2, 3], 6), [1, 2, 3, 4])
    sequences.release(first.slot)
    again = sequences.take([1, 2, 3, 4, 5, 6], 10)
    assert again is not None and again.slot is first.slot
    assert (again.cut_to, again.source, again.kept) == (4, None, 4)


def test_one_token_of_a_known_prompt_is_computed_all_the_same() -> None:
    sequences = pool()
    sequences.release(compute(sequences.take([1, 2, 3], 6), [1, 2, 3]).slot)
    again = sequences.take([1, 2, 3], 6)
    assert again is not None and again.kept == 2


def test_a_head_that_another_holds_is_shared() -> None:
    sequences = pool()
    running = compute(sequences.take([1, 2, 3, 4], 8), [1, 2, 3, 4])
    other = sequences.take([1, 2, 3, 9], 8)
    assert other is not None and other.slot is not running.slot
    assert other.source is running.slot and other.copied == other.kept == 3
    assert other.cut_to == 0 and other.slot.tokens == [1, 2, 3]


def test_nothing_is_shared_across_salts_or_without_reuse() -> None:
    for sequences, salt in ((pool(), "theirs"), (pool(reuse=False), "")):
        first = compute(sequences.take([1, 2, 3], 6), [1, 2, 3])
        sequences.release(first.slot)
        other = sequences.take([1, 2, 3, 4], 6, salt)
        assert other is not None and other.kept == 0


def test_a_long_text_is_not_lost_for_a_short_head() -> None:
    sequences = pool(cells=100)
    long = list(range(40))
    first = compute(sequences.take(long, 41), long)
    sequences.release(first.slot)
    other = sequences.take([0, 1, 99], 6)
    assert other is not None and other.slot is not first.slot and other.kept == 2
    assert first.slot.tokens == long


def test_the_only_idle_text_is_cut_rather_than_copied() -> None:
    sequences = pool(count=1)
    sequences.release(compute(sequences.take([1, 0], 3), [1, 0, 5]).slot)
    taken = sequences.take([1, 0], 3)
    assert taken is not None and (taken.cut_to, taken.source) == (1, None)


def test_idle_texts_make_room_the_oldest_first() -> None:
    sequences = pool()
    for start in (100, 200):
        text = list(range(start, start + 10))
        taken = compute(sequences.take(text, 11), text)
        sequences.release(taken.slot)
    older, newer = sequences.slots[:2]
    taken = compute(sequences.take([7], 15), [7])
    assert taken.evicted == [older] and not older.tokens and newer.tokens
    assert sequences.evicted_tokens == 10


def test_without_one_pool_each_has_its_part_and_shares_nothing() -> None:
    sequences = pool(unified=False)
    assert sequences.longest == 10
    first = compute(sequences.take([1, 2, 3], 10), [1, 2, 3])
    second = sequences.take([1, 2, 3, 4], 10)
    assert second is not None and second.kept == 0 and second.source is None
    assert sequences.take([1], 11) is None
    sequences.release(first.slot)
    third = sequences.take([1, 2, 3, 4], 10)
    assert third is not None and third.slot is first.slot and third.kept == 3


class Machine(RuleBasedStateMachine):
    """Takes, computes and releases in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences = pool(4, 40)
        self.held: dict[int, list[int]] = {}
        """What llama.cpp would hold, by its sequences."""
        self.running: list[tuple[Taken, list[int], int]] = []

    @rule(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12), more=st.integers(1, 12))
    def take(self, prompt: list[int], more: int) -> None:
        taken = self.sequences.take(prompt, len(prompt) + more)
        if taken is None:
            return
        index = taken.slot.index
        self.held[index] = self.held.get(index, [])[: taken.cut_to]
        if taken.source is not None:
            self.held[index] = self.held.get(taken.source.index, [])[: taken.copied]
        for gone in taken.evicted:
            self.held[gone.index] = []
        assert taken.slot.tokens == prompt[: taken.kept] == self.held[index]
        assert taken.kept < len(prompt)
        self.running.append((taken, prompt, len(prompt) + more))

    @rule(data=st.data())
    def compute(self, data: Any) -> None:
        if self.running:
            taken, prompt, limit = data.draw(st.sampled_from(self.running))
            length = data.draw(st.integers(len(taken.slot.tokens), limit))
            text = (prompt + [5] * limit)[:length]
            taken.slot.tokens[:] = text
            self.held[taken.slot.index] = list(text)

    @rule(data=st.data())
    def release(self, data: Any) -> None:
        if self.running:
            one = data.draw(st.sampled_from(self.running))
            self.running.remove(one)
            self.sequences.release(one[0].slot)

    @rule()
    def forget(self) -> None:
        for slot in self.sequences.forget_idle():
            self.held[slot.index] = []

    @invariant()
    def adds_up(self) -> None:
        self.sequences.check_integrity()
        for slot in self.sequences.slots:
            assert slot.tokens == self.held.get(slot.index, [])


Machine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestSequences = Machine.TestCase
