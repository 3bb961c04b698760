"""Why a request missed, and what would have met it, in words."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from orchestrator.recording.facts import PauseTaken, RecordedRequest
from orchestrator.recording.findings import Alone, Findings, Tried
from orchestrator.tasks.deadline import Part
from orchestrator.tasks.misses import MissStage
from protocol import Code, Outcome

TRUSTED: Final = 0.95
"""Share of outcomes that a replay must come to again to be relied on."""


class TimelineEvent(NamedTuple):
    """Something that happened to a request, ``at_ms`` after it arrived."""

    at_ms: float
    event: str
    detail: str = ""


def timeline(request: RecordedRequest) -> list[TimelineEvent]:
    """What happened to a request that has ended, in the order of time."""
    return sorted(_events(request), key=lambda one: one.at_ms)


def reason_of(request: RecordedRequest) -> str:
    """What became of a request that has ended, and what it lacked."""
    match request.outcome:
        case Outcome.MET:
            left_s = request.deadline_at - request.ended
            return f"It was met, {_seconds(left_s)} before its deadline."
        case Outcome.ABORTED:
            return "No deadline was missed: it was cancelled, or its client went away."
        case Outcome.FAILED:
            return f"No deadline was missed: it failed ({request.code})."
        case Outcome.REFUSED:
            return _refusal(request)
        case _:
            pauses = [_pause(pause, request) for pause in request.pauses]
            return " ".join([_lack(request), *pauses])


def verdict_of(found: Findings) -> str:
    """What alone would have met the request, and how far that can be trusted."""
    if found.outcome is None:
        return (
            "It could not be replayed: too much happened beside it for the time that there is, or "
            "no instance that serves its model is known."
        )
    if not found.is_reproduced:
        return (
            "Replayed, it is met: what kept it from that is not in what is recorded, such as an "
            f"instance that stood still. {_trust(found)}"
        )
    met = [change_of(tried) for tried in found.tried if tried.met]
    if met:
        told = f"This alone would have met it: {'; or '.join(met)}."
    else:
        told = "Nothing of what was tried would have met it alone."
    if not found.is_length_known:
        told += (
            f" Its answer was cut: it is taken to be {found.answer_tokens} tokens long, as half of "
            "such answers are."
        )
    return f"{told} {_trust(found)}"


def change_of(tried: Tried) -> str:
    """A change in words."""
    match tried.change:
        case Alone.LET_IN:
            return "to be let in and not given up before its deadline"
        case Alone.NOT_PAUSED:
            return "not to be paused"
        case Alone.ONE_MORE_INSTANCE:
            return "one more instance"
        case Alone.LATER_DEADLINE:
            return f"a deadline {_seconds(tried.by_ms / 1000)} later"
        case Alone.NOBODY_ELSE:
            return "nobody else beside it"


def _trust(found: Findings) -> str:
    cut = " Not all that went on then is still recorded." if found.is_cut else ""
    if not found.compared:
        return f"No other outcome is there to check the replay by.{cut}"
    share = found.agreed / found.compared
    checked = (
        f"Of {found.compared} requests, {found.agreed} are met or not in the replay as they were "
        f"({100 * share:.0f} %)"
    )
    return f"{checked}{'' if share >= TRUSTED else ': too few to rely on it'}.{cut}"


def _refusal(request: RecordedRequest) -> str:
    waited_s = request.ended - request.arrived
    if request.code == Code.QUEUE_FULL:
        return "It was refused: the queue was full, and nobody in it had to give way to it."
    given_s = _seconds(request.deadline_at - request.arrived)
    if request.code == Code.DEADLINE_INFEASIBLE and waited_s > 0.05:
        return f"It was given up after {_seconds(waited_s)} of {given_s}: too little was left."
    if request.ended >= request.deadline_at:
        return "It was refused: its deadline was past when it came."
    return f"It was refused when it came: {given_s} are less than it certainly takes."


def _lack(request: RecordedRequest) -> str:
    """Where the time went."""
    given_s = _seconds(request.deadline_at - request.arrived)
    if request.was_given_up:
        ended = _seconds(request.ended - request.arrived)
        return (
            f"It had {given_s}, and was stopped at {ended} after {request.tokens} tokens: the time "
            "left was certainly too little for the rest."
        )
    queue_s, route_s, prefill_s, decode_s = (_seconds(ms / 1000) for ms in request.spent_ms)
    what = {
        Part.FIRST_TOKEN: "Its first token came too late",
        Part.TOKEN_GAP: "A token after the first one came too late",
    }.get(request.missed_part or Part.WHOLE, f"It had {given_s}")
    match request.blamed:
        case MissStage.QUEUE:
            why = f"it waited {queue_s} for a slot"
        case MissStage.ROUTE:
            why = f"it was {route_s} on the way to its instance and back"
        case MissStage.PREFILL:
            why = f"its prompt of {request.prompt_tokens} tokens took {prefill_s}"
        case MissStage.RETRY:
            times = "once" if request.attempts == 1 else f"{request.attempts} times"
            why = f"an instance did not finish it, {times}"
        case MissStage.PREDICTION:
            chance = 100 * (request.chance or 0.0)
            why = (
                f"it was sent in good time, with a chance of {chance:.0f} %, but took longer than "
                "was predicted"
            )
        case _:
            why = f"the {request.tokens} tokens of its answer took {decode_s}"
    return f"{what}: {why}."


def _pause(pause: PauseTaken, request: RecordedRequest) -> str:
    at = _seconds(pause.at - request.arrived)
    lasted = _seconds(min(pause.until, request.ended) - pause.at)
    return f"It was paused at {at} for {lasted}, {_for_whom(pause)}."


def _for_whom(pause: PauseTaken) -> str:
    if pause.left_s is None:
        return "since fewer jobs at once met more deadlines"
    kind = "batch" if pause.is_for_batch else "interactive"
    return f"for a more urgent {kind} request with {_seconds(max(0.0, pause.left_s))} left"


def _events(request: RecordedRequest) -> Iterator[TimelineEvent]:
    def at(time: float) -> float:
        return round(1000 * (time - request.arrived), 1)

    yield TimelineEvent(0.0, "arrived")
    if request.dispatched:
        yield TimelineEvent(at(request.dispatched), "sent", request.instance)
    if request.first_token:
        yield TimelineEvent(at(request.first_token), "first_token")
    for pause in request.pauses:
        yield TimelineEvent(at(pause.at), "paused", _for_whom(pause))
        if pause.until < request.ended:
            yield TimelineEvent(at(pause.until), "resumed", pause.instance)
    yield TimelineEvent(at(request.deadline_at), "deadline")
    yield TimelineEvent(at(request.ended), "ended", request.code or str(request.outcome or ""))


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
