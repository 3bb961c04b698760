"""How far a request had come at a moment of its life, by what is recorded of the whole."""

from typing import Final, NamedTuple

from perf.sim.replay.recording import RecordedRequest

_NEVER: Final = 0.0


class UnderWay(NamedTuple):
    """A request at one moment between its arrival and its end."""

    request: RecordedRequest
    instance: str
    """The instance that worked on it; empty where it waited or was paused."""
    prompt_tokens: int
    """Tokens of its prompt that were still to be computed; 0 once its answer had begun."""
    made: int
    """Tokens that its answer had."""


def under_way(request: RecordedRequest, at: float, known_until: float) -> UnderWay | None:
    """How far ``request`` had come at a time; None if it had not come, or was over.

    Its tokens are taken to have come evenly from the first one to its end, or to ``known_until``
    where that is unknown, but for its pauses; its prompt likewise since it was sent.
    """
    if not request.arrived < at < request.ended:
        return None
    is_paused = any(pause.at <= at < pause.until for pause in request.pauses)
    is_sent = _NEVER < request.marks.dispatched <= at
    instance = request.instance if is_sent and not is_paused else ""
    if _NEVER < request.marks.first_token <= at:
        share = _share(request, request.marks.first_token, at, min(request.ended, known_until))
        made = max(1, min(request.tokens, request.max_tokens - 1, round(request.tokens * share)))
        return UnderWay(request, instance, 0, made)
    new = request.prompt_tokens - request.cached_tokens
    if is_sent and request.marks.first_token > at:
        new = round(
            new * (1 - _share(request, request.marks.dispatched, at, request.marks.first_token))
        )
    return UnderWay(request, instance, max(1, new), 0)


def _share(request: RecordedRequest, since: float, at: float, until: float) -> float:
    """The share of the time from ``since`` to ``until`` that had passed, pauses left out."""

    def worked_s(end: float) -> float:
        paused_s = sum(max(0.0, min(one.until, end) - max(one.at, since)) for one in request.pauses)
        return max(0.0, end - since - paused_s)

    whole_s = worked_s(until)
    return min(1.0, worked_s(at) / whole_s) if whole_s > 0 else 1.0
