"""Explanations: why a request missed its deadline, and what alone would have met it.

::

    explanation = await client.explain(task.task_id)
    print(explanation.reason)
    for change in explanation.would_have_met:
        print(change.text)                             # such as: a deadline 800 ms later
"""

import msgspec

EXPLAIN_S = 120.0
"""Seconds that an explanation may take: the service makes one at a time."""


class TaskMoment(msgspec.Struct, frozen=True):
    """Something that happened to a task, ``at_ms`` after it arrived."""

    at_ms: float
    event: str
    detail: str = ""


class TriedChange(msgspec.Struct, frozen=True):
    """A change that the service tried, alone, while everything else stayed as it was: ``let_in``,
    ``not_paused``, ``one_more_instance``, ``later_deadline`` (``by_ms``) or ``nobody_else``."""

    change: str
    text: str
    by_ms: float | None = None


class Replay(msgspec.Struct, frozen=True):
    """How far an explanation can be trusted.

    ``cut``: earlier requests beside it are no longer recorded, or were too many.
    ``agreement`` is the share of ``compared`` requests that came to their recorded outcome in the
    replay, None without any; ``reproduced``: whether the task missed in it, too. Where its answer
    was cut, ``answer_tokens`` is how long half of such answers are.
    """

    requests: int
    cut: bool
    compared: int
    agreed: int
    agreement: float | None
    reproduced: bool
    answer_tokens: int
    answer_tokens_known: bool
    took_ms: float


class Explanation(msgspec.Struct, frozen=True):
    """Why a task missed. ``verdict`` and ``replay`` are None for one that did not."""

    task_id: str
    outcome: str
    reason: str
    model: str = ""
    code: str | None = None
    missed_part: str | None = None
    stage: str | None = None
    verdict: str | None = None
    would_have_met: tuple[TriedChange, ...] = ()
    would_not: tuple[TriedChange, ...] = ()
    not_tried: tuple[str, ...] = ()
    timeline: tuple[TaskMoment, ...] = ()
    replay: Replay | None = None
    given_ms: float = 0.0
    chance: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    budget: dict[str, float] = {}
