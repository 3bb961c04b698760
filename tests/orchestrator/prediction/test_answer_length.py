"""How long answers will be: learnt, shrunk to what is known of others, and soon forgotten."""

import random
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.prediction import answer_length
from orchestrator.prediction.answer_length import AnswerLengths, LengthKey
from orchestrator.prediction.forecast import DRAWS, at_share
from orchestrator.tasks.prompt_kind import PromptKind

CAP = 4096
KEY = LengthKey("m", "t", CAP)


def taught(lengths: AnswerLengths, key: LengthKey, tokens: list[int]) -> AnswerLengths:
    for count in tokens:
        lengths.answered(key, count, finished=True)
    return lengths


def median(lengths: AnswerLengths, key: LengthKey, made: int = 0) -> float:
    return at_share(lengths.curve(key).left(made, CAP), 0.5)


def drawn(middle: float, count: int, seed: int = 1, sigma: float = 0.5) -> list[int]:
    rng = random.Random(seed)
    return [max(1, round(middle * rng.lognormvariate(0, sigma))) for _ in range(count)]


lengths_of_answers = st.lists(st.integers(1, CAP), max_size=60)


@settings(max_examples=60, deadline=None)
@given(
    ends=lengths_of_answers,
    cuts=lengths_of_answers,
    made=st.integers(0, 2 * CAP),
    room=st.integers(1, 2 * CAP),
)
def test_a_curve_is_physical(ends: list[int], cuts: list[int], made: int, room: int) -> None:
    """Quantiles rise, from one token to what the cap leaves, whatever was seen."""
    lengths = taught(AnswerLengths(), KEY, ends)
    for tokens in cuts:
        lengths.answered(KEY, tokens, finished=False)
    left = lengths.curve(KEY).left(made, made + room)
    assert len(left) == DRAWS
    assert all(before <= after for before, after in pairwise(left))
    # What is made is rounded down a little where it is much.
    assert left[0] >= 1 and left[-1] <= room + made / 4 + 1


def test_what_is_left_of_an_answer_is_that_of_those_who_got_as_far() -> None:
    """Against the plain count over 4000 answers, of which the last few hundred count; of those one
    in six is longer than a hundred tokens.
    """
    ends = drawn(60, 4000)
    curve = taught(AnswerLengths(), KEY, ends).curve(KEY)
    for made in (0, 10, 40, 100):
        beyond = sorted(tokens - made for tokens in ends if tokens > made)
        for share in (0.25, 0.5, 0.9):
            exact = beyond[int(share * len(beyond))]
            assert at_share(curve.left(made, CAP), share) == pytest.approx(
                exact, rel=0.3 if made < 100 else 0.5, abs=4
            )


def test_cut_answers_count_for_as_far_as_they_got() -> None:
    """A deadline cuts all at 40 tokens: what is known beyond is what was known before."""
    ends = drawn(60, 3000)
    whole, cut, dropped = AnswerLengths(), AnswerLengths(), AnswerLengths()
    for tokens in ends:
        whole.answered(KEY, tokens, finished=True)
        cut.answered(KEY, min(40, tokens), finished=tokens <= 40)
        if tokens <= 40:
            dropped.answered(KEY, tokens, finished=True)
    shares = (0.05, 0.1)  # a fifth ends within 40 tokens
    for share in shares:
        exact = at_share(whole.curve(KEY).left(0, CAP), share)
        assert at_share(cut.curve(KEY).left(0, CAP), share) == pytest.approx(exact, rel=0.2)
    assert median(cut, KEY) > 40 > median(dropped, KEY)


def test_a_kind_of_few_answers_says_what_all_say_and_then_what_its_own_do() -> None:
    lengths = taught(AnswerLengths(), KEY, drawn(400, 500))
    new = LengthKey("m", "new", CAP)
    assert median(lengths, new) == pytest.approx(median(lengths, KEY), rel=0.15)
    taught(lengths, new, drawn(20, 3))
    few = median(lengths, new)
    taught(lengths, new, drawn(20, 60))
    many = median(lengths, new)
    assert 20 * 0.6 < many < 20 * 1.6
    assert many < few


def test_dl19_a_crowd_whose_long_answers_end_last_teaches_no_length_of_its_own() -> None:
    """All of a crowd begin together, so that the last that ends is the longest."""
    lengths = taught(AnswerLengths(), KEY, drawn(100, 100))
    taught(lengths, KEY, sorted(drawn(100, 48, seed=5)))
    assert 70 < median(lengths, KEY) < 140


def test_one_tenants_answers_do_not_move_anothers() -> None:
    """Beyond the shared prior, which weighs little once it has answers of its own."""
    mine, theirs = LengthKey("m", "a", CAP), LengthKey("m", "b", CAP)
    lengths = taught(AnswerLengths(), mine, drawn(50, 400))
    before = lengths.curve(mine)
    taught(lengths, theirs, drawn(2000, 2000))
    after = lengths.curve(mine)
    for share in (0.25, 0.5, 0.75):
        exact = at_share(before.left(0, CAP), share)
        assert at_share(after.left(0, CAP), share) == pytest.approx(exact, rel=0.15)
    assert median(lengths, theirs) > 20 * median(lengths, mine)


def test_what_is_stated_tells_short_from_long() -> None:
    """Caps and deadlines that clients choose by what they expect, and conversations."""
    lengths = AnswerLengths()
    by_cap = [LengthKey("m", "t", cap) for cap in (64, 2048)]
    by_deadline = [LengthKey("m", "t", CAP, ms) for ms in (500.0, 30_000.0)]
    by_session = [LengthKey("m", "t", CAP, None, name) for name in ("short", "long")]
    for seed in range(100):
        for short, long in (by_cap, by_deadline, by_session):
            lengths.answered(short, drawn(20, 1, seed)[0], finished=True)
            lengths.answered(long, drawn(600, 1, seed)[0], finished=True)
    for short, long in (by_cap, by_deadline, by_session):
        assert 5 * median(lengths, short) < median(lengths, long)


def test_a_new_session_of_a_known_kind_begins_with_what_the_kind_says() -> None:
    lengths = AnswerLengths()
    kinds = [PromptKind(name) for name in (b"short", b"long")]
    for seed in range(60):
        for kind, middle in zip(kinds, (15, 500), strict=True):
            key = KEY._replace(kind=kind, session=f"{kind}{seed // 5}", prompt_tokens=50)
            lengths.answered(key, drawn(middle, 1, seed)[0], finished=True)
    short, long = (
        median(lengths, KEY._replace(kind=kind, session="new", prompt_tokens=50)) for kind in kinds
    )
    assert short < 40 and long > 250


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tenants and sessions come and go; the one in use is kept."""
    monkeypatch.setattr(answer_length, "_MAX_NODES", 400)
    monkeypatch.setattr(answer_length, "_MAX_AT_HAND", 100)
    lengths = taught(AnswerLengths(), KEY, [30] * 50)
    for i in range(400):
        lengths.answered(LengthKey("m", f"t{i}", 64, None, f"s{i}"), 500, finished=True)
        lengths.curve(LengthKey("m", f"t{i}", 64, None, f"s{i}"))
        if i % 50 == 0:
            lengths.answered(KEY, 30, finished=True)
    assert len(lengths._nodes) <= 400
    assert len(lengths._mixed) <= 100
    assert median(lengths, KEY) < 60


def test_what_is_learnt_takes_the_memory_that_is_told() -> None:
    kinds = [PromptKind(b"%d" % at, (b"%d" % at,)) for at in range(300)]
    keys = [LengthKey("m", "t", CAP, kind=kind) for kind in kinds]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        lengths = AnswerLengths()
        for key in keys:
            lengths.answered(key, 40, finished=True)
            lengths.curve(key).left(0, CAP)
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(lengths) == 603 and used / 2 < lengths.total_bytes < 2 * used < 16 * 2**20
