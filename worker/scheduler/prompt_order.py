"""In which order prompts are computed: what gains most from the next prompt tokens goes first."""

import math

_HORIZON = 2.0
_LEAST_S = 1e-6


def prompt_urgency(slack_s: float, work_s: float, backlog_s: float) -> float:
    """The larger goes first: the apparent tardiness cost as a logarithm (Vepsalainen, Morton 1987).

    ``slack_s`` is what is left until the request must be worked on without a break, ``work_s`` what
    it takes, ``backlog_s`` what all prompts under way take together. With a short backlog that is
    least slack first, with a long one the shortest work first: when not everybody can be in time,
    one long prompt must not make several short ones late.
    """
    wait_s = max(_LEAST_S, _HORIZON * backlog_s)
    return -max(0.0, slack_s) / wait_s - math.log(max(_LEAST_S, work_s))
