"""Errors: requests that cannot be read, and what their answers look like."""

import json
from typing import Final

from .pace import Trial
from .rules import Finding, Verdict
from .wire import Answer

_CASES: Final = {
    "a body that is not JSON": b'{"model": ',
    "messages that are a number": {"messages": 5},
    "a max_tokens that is a word": {"max_tokens": "many"},
    "the same, streamed": {"max_tokens": "many", "stream": True},
}


async def check(trial: Trial) -> list[Finding]:
    """Send what cannot be read."""
    answers = {what: await _sent(trial, case) for what, case in _CASES.items()}
    wrong = [
        f"{what}: {answer.outcome()}"
        for what, answer in answers.items()
        if not 400 <= answer.status < 500
    ]
    refused = {what: answer for what, answer in answers.items() if answer.is_refused}
    shapeless = [
        f"{what}: {answer.body[:80].decode(errors='replace')!r}"
        for what, answer in refused.items()
        if not has_error_object(answer)
    ]
    return [
        _finding("errors.status", wrong, f"{len(answers)} of {len(answers)} refused with 4xx"),
        _finding("errors.shape", shapeless, f"{len(refused)} of {len(refused)} error objects")
        if refused
        else Finding("errors.shape", Verdict.UNMEASURED, "nothing was refused"),
    ]


async def _sent(trial: Trial, case: object) -> Answer:
    body = case
    if isinstance(case, dict):
        usual = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
        body = json.dumps({"model": trial.target.model, **usual, **case}).encode()
    assert isinstance(body, bytes)
    return await trial.wire.begin_post(body, trial.effort.patience_s).end()


def has_error_object(answer: Answer) -> bool:
    """Whether an error is told as OpenAI tells it."""
    return answer.error is not None and isinstance(answer.error.get("message"), str)


def _finding(rule: str, wrong: list[str], well: str) -> Finding:
    if wrong:
        return Finding(rule, Verdict.FAIL, "; ".join(wrong))
    return Finding(rule, Verdict.PASS, well)
