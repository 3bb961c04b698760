"""Partial answers: what there is at the deadline, for those who ask for it."""

from .expiry import NOT_TOLD, cut_answers, judged
from .pace import Trial
from .rules import Finding, Verdict
from .wire import Answer

_RULE = "partial.answer"


async def check(trial: Trial) -> list[Finding]:
    """Ask for what there is, streamed and not."""
    target = trial.target
    if not target.deadline.is_told:
        return [Finding(_RULE, Verdict.NOT_APPLICABLE, NOT_TOLD)]
    if not target.partial:
        said = "no field was named by which a client asks for it (--partial)"
        return [Finding(_RULE, Verdict.NOT_APPLICABLE, said)]
    cut_s = trial.cut_s()
    answers = [
        answer
        for stream in (True, False)
        for answer in await cut_answers(trial, cut_s, stream=stream, more=target.partial)
    ]
    timely = judged(_RULE, answers, cut_s, trial.pace.tolerance_s)
    lacking = [answer for answer in answers if not answer.is_hung_up and not _is_partial(answer)]
    if timely.verdict is Verdict.PASS and lacking:
        said = f"{len(lacking)} of {len(answers)}: {lacking[0].outcome()}"
        return [Finding(_RULE, Verdict.FAIL, said, timely.figures)]
    return [timely]


def _is_partial(answer: Answer) -> bool:
    is_well = answer.status == 200 and answer.error is None and not answer.broken
    return is_well and answer.is_complete and bool(answer.text) and bool(answer.finish)
