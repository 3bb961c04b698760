"""One suite over all engines: a job's promises hold whatever computes its tokens.

Through a real worker and its lanes, on the demo model. What an engine's card says it lacks is
skipped by name, and so is an engine that is not installed.
"""

from collections.abc import Iterator

import pytest

from protocol import (
    Code,
    Feature,
    FinishReason,
    Grammar,
    GrammarKind,
    OnDeadline,
)
from tests.support.engines import ENGINES, MAX_RUNNING, Answer, EngineCase, LaneClient, Served

# Of others' packages, while they are imported.
pytestmark = [
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("default::FutureWarning"),
]

CLOSE = 1e-3
"""Two tokens of which one is likelier by no more than this may change places between engines."""
LONG = 1500
PROMPT = "What is a tide?"


@pytest.fixture(scope="module", params=ENGINES, ids=str)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    case: EngineCase = request.param
    if case.missing:
        pytest.skip(case.missing)
    served = Served(case)
    yield served
    lane = served.lane()
    left = [lane.submit(served.encode(PROMPT), max_tokens=LONG) for _ in range(2 * MAX_RUNNING)]
    lane.begin(left[0])
    served.close()
    assert {lane.end(handle).code for handle in left} <= {None, Code.DRAINING}
    assert lane.responder.finals == 1
    served.close()


@pytest.fixture
def lane(served: Served) -> Iterator[LaneClient]:
    lane = served.lane()
    yield lane
    if not lane.responder.finals:
        lane.lose()


@pytest.fixture(scope="module")
def expected() -> Iterator[Answer]:
    """Our own engine's answer to ``PROMPT``, with what was likely at each token."""
    reference = Served(ENGINES[0])
    yield reference.lane().run(reference.encode(PROMPT), max_tokens=400, logprobs=5)
    reference.close()


def needs(served: Served, *features: Feature) -> None:
    missing = [feature.value for feature in features if served.lacks(feature)]
    if missing:
        pytest.skip(f"{served.case} has no {', '.join(missing)}: its card says so")


def assert_same(served: Served, got: list[int], expected: Answer, *, start: int = 0) -> int:
    """``got`` is what ``expected`` has from ``start`` on; returns how many tokens were equal.

    From where two tokens are as good as equally likely on, texts may go apart.
    """
    for place, token in enumerate(got):
        at = place + start
        if token == expected.ids[at]:
            continue
        likely = dict(expected.logprobs[at].top)
        gap = expected.logprobs[at].logprob - likely.get(token, float("-inf"))
        assert gap < CLOSE, f"token {at} is {token}, not {expected.ids[at]}"
        return place
    return len(got)


def _endless(served: Served) -> dict[str, object]:
    """To go on for as long as may be; some engines' texts end all the same."""
    goes_on = not served.lacks(Feature.IGNORE_EOS)
    return {"max_tokens": LONG} | ({"ignore_eos": True} if goes_on else {})


# ── texts ────────────────────────────────────────────────────────────────────────────────────


def test_the_greedy_text_is_our_own_engines(
    served: Served, lane: LaneClient, expected: Answer
) -> None:
    answer = lane.run(served.encode(PROMPT), max_tokens=400)
    equal = assert_same(served, answer.ids, expected)
    assert equal >= 20
    if equal == len(expected.ids):
        assert answer.text == expected.text
        assert answer.end.reason is FinishReason.STOP
        assert answer.ids[-1] in served.card.eos_token_ids


def test_an_answer_ends_by_itself_and_goes_on_where_that_is_ignored(
    served: Served, lane: LaneClient
) -> None:
    short = served.encode("hello")
    answer = lane.run(short, max_tokens=200)
    assert answer.end.reason is FinishReason.STOP
    assert answer.ids[-1] in served.card.eos_token_ids
    needs(served, Feature.IGNORE_EOS)
    longer = lane.run(short, max_tokens=len(answer.ids) + 20, ignore_eos=True)
    assert longer.end.reason is FinishReason.LENGTH
    assert longer.end.completion_tokens == len(answer.ids) + 20


def test_min_tokens_hold_the_end_back(served: Served, lane: LaneClient) -> None:
    needs(served, Feature.MIN_TOKENS)
    short = served.encode("hello")
    before = lane.run(short, max_tokens=200).end.completion_tokens
    answer = lane.run(short, max_tokens=before + 12, min_tokens=before + 10)
    assert answer.end.completion_tokens > before + 10
    assert not set(answer.ids[: before + 10]) & set(served.card.eos_token_ids)


def test_a_stop_token_ends_the_answer(served: Served, lane: LaneClient) -> None:
    needs(served, Feature.STOP_TOKEN_IDS)
    ids = lane.run(served.encode(PROMPT), max_tokens=40).ids
    place = next(i for i in range(4, len(ids)) if ids[i] not in ids[:i])
    answer = lane.run(served.encode(PROMPT), max_tokens=40, stop_token_ids=(ids[place],))
    assert answer.end.reason is FinishReason.STOP
    assert answer.end.stop_token_id == ids[place]
    assert answer.ids == ids[: place + 1]
    if not served.lacks(Feature.MIN_TOKENS):
        asked = {"stop_token_ids": (ids[place],), "min_tokens": place + 4}
        held_open = lane.run(served.encode(PROMPT), max_tokens=40, **asked)
        assert ids[place] not in held_open.ids[: place + 4]


def test_a_stop_string_ends_the_answer(served: Served, lane: LaneClient) -> None:
    whole = lane.run(served.encode(PROMPT), max_tokens=40).text
    stop = whole[10:14]
    answer = lane.run(served.encode(PROMPT), max_tokens=40, stop=(stop,))
    assert (answer.end.reason, answer.end.code, answer.end.stop) == (FinishReason.STOP, None, stop)
    assert answer.text == whole[: whole.index(stop)]


def test_a_seed_repeats_and_another_one_does_not(served: Served, lane: LaneClient) -> None:
    needs(served, Feature.SEED)

    def drawn(seed: int) -> list[int]:
        # Not of the long tail: each of its tokens is about as likely as sums are exact, and other
        # engines add up in another order where a prompt is found computed.
        asked = {"max_tokens": 30, "temperature": 1.2, "top_p": 0.9, "seed": seed}
        if not served.lacks(Feature.IGNORE_EOS):
            asked["ignore_eos"] = True
        return lane.run(served.encode(PROMPT), **asked).ids

    first = drawn(11)
    assert drawn(11) == first != drawn(12)


def test_logprobs_are_told_for_every_token(
    served: Served, lane: LaneClient, expected: Answer
) -> None:
    needs(served, Feature.LOGPROBS)
    answer = lane.run(served.encode(PROMPT), max_tokens=12, logprobs=3)
    assert len(answer.logprobs) == len(answer.ids) == 12
    for token, one in zip(answer.ids, answer.logprobs, strict=True):
        assert len(one.top) == 3
        assert one.top[0] == (token, one.logprob)  # greedy
        assert one.logprob <= 0 and one.rank in (0, 1)
    for mine, ours in zip(answer.logprobs, expected.logprobs, strict=False):
        assert mine.logprob == pytest.approx(ours.logprob, abs=0.01)


def test_logprobs_of_the_prompt(served: Served, lane: LaneClient) -> None:
    needs(served, Feature.PROMPT_LOGPROBS)
    prompt = served.encode(PROMPT)
    handle = lane.submit(prompt, max_tokens=0, prompt_logprobs=2)
    end = lane.end(handle)
    pieces = lane.prompts(handle)
    assert (end.reason, end.completion_tokens) == (FinishReason.LENGTH, 0)
    assert [piece.first for piece in pieces][:1] == [1]
    assert sum(map(len, pieces)) == len(prompt) - 1


def test_penalties_and_biases_change_the_text(served: Served, lane: LaneClient) -> None:
    needs(served, Feature.PENALTIES, Feature.LOGIT_BIAS)
    prompt = served.encode(PROMPT)
    plain = lane.run(prompt, max_tokens=60).ids
    banned = lane.run(prompt, max_tokens=30, logit_bias=((plain[0], -100.0),)).ids
    assert plain[0] not in banned
    varied = lane.run(prompt, max_tokens=60, frequency_penalty=2.0).ids
    assert len(set(varied)) / len(varied) > len(set(plain)) / len(plain)


def test_a_begun_answer_goes_on_where_it_was_left(
    served: Served, lane: LaneClient, expected: Answer
) -> None:
    if not served.card.can_continue:
        pytest.skip(f"{served.case} cannot continue an answer: its card says so")
    prompt = served.encode(PROMPT) + expected.ids[:9]
    answer = lane.run(prompt, max_tokens=20, begun=9)
    assert assert_same(served, answer.ids, expected, start=9) >= 10
    assert answer.end.completion_tokens == 20


def test_a_grammar_is_kept_to(served: Served, lane: LaneClient) -> None:
    needs(served, Feature.GRAMMAR)
    assert served.card.grammars
    grammar = Grammar(GrammarKind.REGEX, "[0-9]{4}-[0-9]{2}")
    answer = lane.run(served.encode(PROMPT), max_tokens=40, grammar=grammar)
    assert answer.end.code is None
    text = answer.text
    assert len(text) == 7 and text[4] == "-" and text.replace("-", "").isdigit()


# ── aborts and deadlines ─────────────────────────────────────────────────────────────────────


def test_dl4_a_cancelled_job_is_gone_within_a_step(served: Served, lane: LaneClient) -> None:
    """Counted in tokens: what the step under way made of it is all that comes too late."""
    jobs = [lane.submit(served.encode(PROMPT), **_endless(served)) for _ in range(MAX_RUNNING)]
    for handle in jobs:
        lane.begin(handle)
    lane.cancel(*jobs[1:])
    for handle in jobs[1:]:
        end = lane.end(handle)
        if end.code is not None:  # else it was faster than the cancel
            assert (end.reason, end.code) == (FinishReason.CANCELLED, Code.CANCELLED)
            assert end.late_tokens <= 2
            assert end.completion_tokens == len(lane.ids(handle)) < LONG
            assert end.abort_ms is not None and end.abort_ms >= 0
    assert not lane.ends(jobs[0]) or lane.end(jobs[0]).code is None
    lane.cancel(*jobs)
    lane.end(jobs[0])


def test_dl6_a_deadline_is_a_clean_end_where_the_client_takes_what_there_is(
    served: Served, lane: LaneClient
) -> None:
    budget_ms, begun = 400.0, False
    while not begun:
        handle = lane.submit(
            served.encode(PROMPT),
            budget_ms=budget_ms,
            on_deadline=OnDeadline.PARTIAL,
            **_endless(served),
        )
        end = lane.end(handle)
        begun = end.code is None
        if not begun:
            # The machine did something else for all of it: there is no text to end cleanly.
            assert (end.code, end.completion_tokens) == (Code.DEADLINE_EXCEEDED, 0)
        budget_ms *= 2
    assert (end.reason, end.code, end.message) == (FinishReason.DEADLINE, None, "")
    assert end.completion_tokens == len(lane.ids(handle)) < LONG


def test_dl23_a_text_is_brought_to_a_whole_end_before_its_deadline(
    served: Served, lane: LaneClient, expected: Answer
) -> None:
    needs(served, Feature.FINISH)
    budget_ms, is_whole = 60.0, False
    while not is_whole:
        handle = lane.submit(
            served.encode(PROMPT),
            budget_ms=budget_ms,
            on_deadline=OnDeadline.FINISH,
            max_tokens=LONG,
        )
        end = lane.end(handle)
        is_whole = end.code is None and end.reason is not FinishReason.DEADLINE
        budget_ms *= 2  # the machine did something else for most of it
    ids = lane.ids(handle)
    assert ids[-1] in served.card.eos_token_ids
    assert len(ids) < len(expected.ids) or budget_ms > 500.0
    assert lane.text(handle).rstrip()[-1:] in tuple(".!?\"')"), lane.text(handle)
