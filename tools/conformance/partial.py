"""Partial answers: the text so far at the deadline, on request."""

from .expiry import cut_answers, in_time
from .rules import NOT_TOLD, Finding, Verdict, inapplicable, judged
from .server import Server

_RULE = "partial.answer"


async def check(server: Server) -> list[Finding]:
    more = server.target.partial
    if not server.target.deadline.is_told:
        return inapplicable(NOT_TOLD, _RULE)
    if not more:
        return inapplicable("no field was named by which a client asks for it (--partial)", _RULE)
    cut_s = server.cut_s()
    answers = await cut_answers(server, cut_s, more=more)
    answers += await cut_answers(server, cut_s, more=more, stream=False)
    timely = in_time(_RULE, answers, cut_s, server.tolerance_s)
    ended = [answer for answer in answers if not answer.is_hung_up]
    lacking = [one for one in ended if not (one.is_well and one.texts and one.finish)]
    if timely.verdict is not Verdict.PASS or not lacking:
        return [timely]
    said = f"{len(lacking)} of {len(answers)}: {lacking[0].outcome()}"
    return [judged(_RULE, False, said, **timely.figures)]
