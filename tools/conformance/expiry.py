"""Expiry: answers with a deadline before their end, and partial answers: the text so far at the
deadline, on request."""

from collections.abc import Sequence
from statistics import median
from typing import Any, Final

from .rules import NOT_TOLD, RULES, Finding, Verdict, inapplicable, judged, unmeasured
from .server import Answer, Server

_PAST_S: Final = 0.001
_PARTIAL: Final = "partial.answer"


async def check(server: Server) -> list[Finding]:
    saying = server.target.deadline
    if not saying.is_told:
        return inapplicable(NOT_TOLD, *(rule.id for rule in RULES if rule.group == "expiry"))
    cut_s = server.cut_s()
    streams = await _cut_answers(server, cut_s)
    whole = await _cut_answers(server, cut_s, stream=False)
    past = await server.one(saying.said(_PAST_S))
    unread = await server.one(saying.unreadable())
    return [
        _in_time("expiry.stream", streams, cut_s, server.tolerance_s),
        _in_time("expiry.whole", whole, cut_s, server.tolerance_s),
        _told(server, cut_s, streams + whole),
        judged("expiry.past", past.is_error and not past.texts, past.outcome()),
        judged("expiry.unreadable", 400 <= unread.status < 500, unread.outcome()),
    ]


async def check_partial(server: Server) -> list[Finding]:
    more = server.target.partial
    if not server.target.deadline.is_told:
        return inapplicable(NOT_TOLD, _PARTIAL)
    if not more:
        why = "no field was named by which a client asks for it (--partial)"
        return inapplicable(why, _PARTIAL)
    cut_s = server.cut_s()
    answers = await _cut_answers(server, cut_s, more=more)
    answers += await _cut_answers(server, cut_s, more=more, stream=False)
    timely = _in_time(_PARTIAL, answers, cut_s, server.tolerance_s)
    ended = [answer for answer in answers if not answer.is_hung_up]
    lacking = [one for one in ended if not (one.is_well and one.texts and one.finish)]
    if timely.verdict is not Verdict.PASS or not lacking:
        return [timely]
    said = f"{len(lacking)} of {len(answers)}: {lacking[0].outcome()}"
    return [judged(_PARTIAL, False, said, **timely.figures)]


async def _cut_answers(server: Server, cut_s: float, **asked: Any) -> list[Answer]:
    """Answers of requests that would take several times ``cut_s``, their deadline, one after the
    other; the client hangs up well after that."""
    tokens, limit_s = _tokens(server, cut_s), 2 * cut_s + 5 * server.tolerance_s
    rounds, saying = range(server.effort.rounds), server.target.deadline
    return [await server.chat(tokens, limit_s, told=saying.said(cut_s), **asked) for _ in rounds]


def _tokens(server: Server, cut_s: float) -> int:
    return min(server.longest, round(4 * cut_s / server.gap_s))


def _in_time(rule: str, answers: Sequence[Answer], cut_s: float, tolerance_s: float) -> Finding:
    """Whether answers ended by their deadline."""
    if 2 * sum(each.is_whole and each.end_s < cut_s for each in answers) > len(answers):
        return unmeasured(rule, "its answers ended by themselves before that")
    late = [answer.end_s - cut_s for answer in answers]
    refused = sum(answer.is_refused for answer in answers)
    open_ = sum(answer.is_hung_up for answer in answers)
    middle, worst = median(late), max(late)
    said = (
        f"{1000 * middle:+.0f} ms (worst {1000 * worst:+.0f}) about a deadline of"
        f" {1000 * cut_s:.0f} ms; {refused} of {len(answers)} with an error's status"
        + (f", {open_} had no end when this client hung up" if open_ else "")
    )
    times = {"deadline": cut_s, "late": middle, "worst": worst, "tolerance": tolerance_s}
    figures = {f"{name}_ms": 1000 * value for name, value in times.items()}
    return judged(rule, middle <= tolerance_s, said, **figures)


def _told(server: Server, cut_s: float, answers: Sequence[Answer]) -> Finding:
    rule, may_stop = "expiry.told", not server.fields  # the model decides where its answers end

    def was_cut(answer: Answer) -> bool:
        """Whether something other than its own length ended it."""
        is_all = answer.tokens >= _tokens(server, cut_s) or (may_stop and answer.finish == "stop")
        return not answer.is_hung_up and not (answer.is_whole and is_all)

    def is_silent(answer: Answer) -> bool:
        tells = answer.finish not in ("", "stop", "length")
        return not (answer.has_error_object if answer.is_error else tells)

    cut = [answer for answer in answers if was_cut(answer)]
    if not cut:
        return inapplicable("no answer was ended by its deadline", rule)[0]
    if silent := [answer for answer in cut if is_silent(answer)]:
        said = f"{len(silent)} of {len(cut)} do not tell: {silent[0].outcome()}"
        return judged(rule, False, said)
    return judged(rule, True, f"{len(cut)} of {len(cut)}: {cut[0].outcome()}")
