"""Forecasts of answers' lengths, by kind of prompt and without it, judged on made-up mixtures.

    python -m perf.sim.lengths [--answers 2000] [--seed N]

Answers come one after the other, each foretold before it is learnt from. ``bits`` is the mean of
−log2 of the probability of what came (of its bin; of lasting so long where it was cut), ``loss``
the mean pinball loss over all quantiles as a share of the mean length. Less is better for both.
"""

import argparse
import math
import random
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

from orchestrator.prediction import AnswerLengths, LengthCurve, LengthKey
from orchestrator.prediction.answer_length import QUANTILES
from orchestrator.tasks.prompt_kind import ANY_KIND, PromptKind

CAP = 2048


class Answer(NamedTuple):
    """One answer; ``cut_at`` is where a deadline stops it, if it gets so far."""

    key: LengthKey
    tokens: int
    cut_at: int = CAP


class Score(NamedTuple):
    """Score of the forecasts on a mixture: ``bits`` and ``loss`` as in the module."""

    bits: float
    loss: float


def _drawn(rng: random.Random, median: float, sigma: float = 0.4) -> int:
    return min(CAP, max(1, round(median * rng.lognormvariate(0, sigma))))


def _key(kind: PromptKind, prompt_tokens: int, session: str = "") -> LengthKey:
    return LengthKey("m", "t", CAP, None, session, prompt_tokens, kind)


def facts_and_stories(rng: random.Random, count: int) -> Iterator[Answer]:
    """Answers to questions of some opening words and to wishes for stories, half each; topics
    differ."""
    for i in range(count):
        is_story = rng.random() < 0.5
        first, few = (b"tell", b"tell me a") if is_story else (b"what", b"what is the")
        if rng.random() < 0.2:
            few = b"%d" % i  # nobody else begins so
        kind = PromptKind(b"", (first, few))
        prompt = rng.randrange(8, 40)
        yield Answer(_key(kind, prompt), _drawn(rng, 180 if is_story else 12))


def cut_stories(rng: random.Random, count: int) -> Iterator[Answer]:
    """Facts and stories, with a deadline that cuts whatever gets beyond 120 tokens."""
    for answer in facts_and_stories(rng, count):
        yield answer._replace(cut_at=120)


def instructed(rng: random.Random, count: int) -> Iterator[Answer]:
    """Answers of twenty applications with system prompts of their own; some have tools."""
    medians = [8 * 1.35**i for i in range(20)]
    for i in range(count):
        one = rng.randrange(20)
        kind = PromptKind(b"app %d" % one, (b"%d" % rng.randrange(40), b"%d" % i))
        yield Answer(_key(kind, rng.randrange(50, 900)), _drawn(rng, medians[one]))


def summaries(rng: random.Random, count: int) -> Iterator[Answer]:
    """Answers that are the longer, the longer the prompt."""
    for i in range(count):
        prompt = round(math.exp(rng.uniform(math.log(50), math.log(8000))))
        kind = PromptKind(b"", (b"%d" % rng.randrange(100), b"%d" % i))
        yield Answer(_key(kind, prompt), _drawn(rng, prompt / 8))


def sessions(rng: random.Random, count: int) -> Iterator[Answer]:
    """Answers in conversations of twelve turns, forty at a time, each with a length of its own."""
    medians = {i: _drawn(rng, 60, 1.0) for i in range(40)}
    turns = dict.fromkeys(medians, 0)
    for i in range(count):
        one = rng.choice(list(medians))
        prompt = 30 + 60 * turns[one]
        kind = PromptKind(b"app", (b"%d" % rng.randrange(60), b"%d" % i))
        yield Answer(
            _key(kind, prompt, f"s{one}"),
            _drawn(rng, medians[one], 0.3),
        )
        turns[one] += 1
        if turns[one] == 12:
            del medians[one], turns[one]
            medians[i + 100], turns[i + 100] = _drawn(rng, 60, 1.0), 0


def swapped(rng: random.Random, count: int) -> Iterator[Answer]:
    """Answers whose kinds change places halfway: what was short is long from then on."""
    for i, answer in enumerate(facts_and_stories(rng, count)):
        is_story = (answer.key.kind.opening[0] == b"tell") == (i < count // 2)
        yield answer._replace(tokens=_drawn(rng, 180 if is_story else 12))


def meaningless(rng: random.Random, count: int) -> Iterator[Answer]:
    """Answers whose kinds say nothing: prompts all differ, or are one of a few, with like
    lengths."""
    for i in range(count):
        kind = PromptKind(b"app %d" % rng.randrange(30), (b"%d" % rng.randrange(30), b"%d" % i))
        yield Answer(
            _key(kind, rng.randrange(10, 4000), f"s{rng.randrange(50)}"),
            _drawn(rng, 80, 0.9),
        )


Mixture = Callable[[random.Random, int], Iterator[Answer]]
MIXTURES: tuple[Mixture, ...] = (
    facts_and_stories,
    cut_stories,
    instructed,
    summaries,
    sessions,
    swapped,
    meaningless,
)


def _without(key: LengthKey) -> LengthKey:
    return key._replace(kind=ANY_KIND, prompt_tokens=0)


def score(answers: list[Answer], *, by_kind: bool, skipped: int = 100) -> Score:
    """Score over all answers but the first ``skipped``, of which nobody could know anything."""
    lengths = AnswerLengths()
    bits = loss = tokens = 0.0
    for number, answer in enumerate(answers):
        key = answer.key if by_kind else _without(answer.key)
        curve, came = lengths.curve(key), min(answer.tokens, answer.cut_at)
        is_whole = answer.tokens <= answer.cut_at
        if number >= skipped:
            bits -= math.log2(max(1e-6, curve.chance(came, finished=is_whole)))
            loss += _pinball(curve, answer.tokens)
            tokens += answer.tokens
        lengths.answered(key, came, finished=is_whole)
    return Score(bits / (len(answers) - skipped), loss / tokens)


def _pinball(curve: LengthCurve, tokens: int) -> float:
    """Mean pinball loss over the quantiles."""
    total = 0.0
    for i, guess in enumerate(curve.left(0, CAP)):
        share = (i + 0.5) / QUANTILES
        total += (tokens - guess) * (share if tokens > guess else share - 1)
    return total / QUANTILES


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for mixture in MIXTURES:
        answers = list(mixture(random.Random(args.seed), args.answers))
        known, plain = (score(answers, by_kind=by_kind) for by_kind in (True, False))
        print(
            f"{mixture.__name__:18} bits {known.bits:.2f} beside {plain.bits:.2f} without kinds,"
            f" loss {known.loss:.3f} beside {plain.loss:.3f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
