"""Expiry: what becomes of answers whose deadline comes before their end."""

import statistics
from collections.abc import Mapping, Sequence

from .error_shapes import has_error_object
from .pace import Trial
from .rules import Finding, Verdict
from .target import Saying
from .wire import Answer

NOT_TOLD = "the server is told of no deadline: its clients hang up"
_PAST_S = 0.001


async def check(trial: Trial) -> list[Finding]:
    """Cut answers by deadlines, and state deadlines that no answer can keep."""
    rules = ("stream", "whole", "told", "past", "unreadable")
    if not trial.target.deadline.is_told:
        return [Finding(f"expiry.{name}", Verdict.NOT_APPLICABLE, NOT_TOLD) for name in rules]
    cut_s = trial.cut_s()
    streams = await cut_answers(trial, cut_s, stream=True)
    whole = await cut_answers(trial, cut_s, stream=False)
    return [
        judged("expiry.stream", streams, cut_s, trial.pace.tolerance_s),
        judged("expiry.whole", whole, cut_s, trial.pace.tolerance_s),
        _told(trial, cut_s, streams + whole),
        await refusal("expiry.past", trial, trial.told(_PAST_S)),
        await _unreadable(trial),
    ]


async def cut_answers(
    trial: Trial,
    cut_s: float,
    *,
    stream: bool,
    more: Mapping[str, object] | None = None,
) -> list[Answer]:
    """Answers of requests that would take several times ``cut_s``, one after the other."""
    return [
        await cut_answer(trial, cut_s, trial.told(cut_s), stream=stream, more=more)
        for _ in range(trial.effort.rounds)
    ]


async def cut_answer(
    trial: Trial,
    cut_s: float,
    told: tuple[Saying, str],
    *,
    stream: bool = True,
    more: Mapping[str, object] | None = None,
    slack_s: float = 0.0,
) -> Answer:
    """Answer of a request that would take several times ``cut_s``, whose deadline is stated as
    ``told``; the client hangs up well after that and ``slack_s``."""
    limit_s = 2 * cut_s + 5 * trial.pace.tolerance_s + slack_s
    tokens = _tokens(trial, cut_s + slack_s)
    return await trial.wire.chat(tokens, limit_s, stream=stream, told=told, more=more)


def _tokens(trial: Trial, cut_s: float) -> int:
    return min(trial.pace.longest, round(4 * cut_s / trial.pace.gap_s))


def judged(rule: str, answers: Sequence[Answer], cut_s: float, tolerance_s: float) -> Finding:
    """Whether answers ended by their deadline."""
    early = sum(answer.is_whole and answer.end_s < cut_s for answer in answers)
    if 2 * early > len(answers):
        return Finding(rule, Verdict.UNMEASURED, "its answers ended by themselves before that")
    late = [answer.end_s - cut_s for answer in answers]
    refused = sum(answer.is_refused for answer in answers)
    open_ = sum(answer.is_hung_up for answer in answers)
    middle = statistics.median(late)
    said = (
        f"{1000 * middle:+.0f} ms (worst {1000 * max(late):+.0f}) about a deadline of"
        f" {1000 * cut_s:.0f} ms; {refused} of {len(answers)} with an error's status"
        + (f", {open_} had no end when this client hung up" if open_ else "")
    )
    figures = {"deadline_ms": 1000 * cut_s, "late_ms": 1000 * middle, "worst_ms": 1000 * max(late)}
    figures["tolerance_ms"] = 1000 * tolerance_s
    return Finding(rule, Verdict.PASS if middle <= tolerance_s else Verdict.FAIL, said, figures)


def _told(trial: Trial, cut_s: float, answers: Sequence[Answer]) -> Finding:
    rule = "expiry.told"
    cut = [answer for answer in answers if _was_cut(trial, cut_s, answer)]
    if not cut:
        return Finding(rule, Verdict.NOT_APPLICABLE, "no answer was ended by its deadline")
    silent = [answer for answer in cut if not _is_told(answer)]
    if silent:
        said = f"{len(silent)} of {len(cut)} do not tell: {silent[0].outcome()}"
        return Finding(rule, Verdict.FAIL, said)
    return Finding(rule, Verdict.PASS, f"{len(cut)} of {len(cut)}: {cut[0].outcome()}")


def _was_cut(trial: Trial, cut_s: float, answer: Answer) -> bool:
    """Whether something other than its own length ended it."""
    if answer.is_hung_up:
        return False
    may_stop = not trial.wire.fields  # the model decides where its answers end
    is_all = answer.tokens >= _tokens(trial, cut_s) or (may_stop and answer.finish == "stop")
    return not (answer.is_whole and is_all)


def _is_told(answer: Answer) -> bool:
    if answer.is_refused or answer.error is not None:
        return has_error_object(answer)
    return bool(answer.finish) and answer.finish not in ("stop", "length")


async def refusal(rule: str, trial: Trial, told: tuple[Saying, str]) -> Finding:
    """Whether a request is refused, before any text, whose deadline nothing can keep."""
    answer = await trial.wire.chat(trial.pace.short, trial.effort.patience_s, told=told)
    is_refused = (answer.is_refused or answer.error is not None) and not answer.texts
    return Finding(rule, Verdict.PASS if is_refused else Verdict.FAIL, answer.outcome())


async def _unreadable(trial: Trial) -> Finding:
    saying = trial.target.deadline
    answer = await trial.wire.chat(
        trial.pace.short, trial.effort.patience_s, told=(saying, saying.unreadable())
    )
    is_refused = 400 <= answer.status < 500
    verdict = Verdict.PASS if is_refused else Verdict.FAIL
    return Finding("expiry.unreadable", verdict, answer.outcome())
