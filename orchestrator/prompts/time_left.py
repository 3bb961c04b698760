"""Tells a model how much time its run has left (DL-24)::

    …<|user|>And then?

    [About 20 seconds are left for this task.]<|assistant|>

The note is at the end of the last turn, in any role. So earlier turns stay cached, and there are
never two user turns in a row, which some templates reject. The steps are coarse, so that a turn
soon after has the same text."""

from dataclasses import replace
from itertools import takewhile

from orchestrator.errors import InvalidRequest
from orchestrator.prompts.kinds import chat_of, has_turns
from orchestrator.prompts.turns import with_end
from orchestrator.tasks.job import Job, Prompt
from protocol import GrammarKind

_STEPS_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800)
_FINISH = ": give your final answer now, with what you have"


def with_time_left(prompt: Prompt, job: Job, left_s: float) -> Prompt:
    """``prompt`` with the seconds left in its last turn, according to ``job.tell_time``, and
    without tools when they are withheld. Unchanged if it ends with the model's text. Raises
    ``InvalidRequest`` if it is not a chat and the request itself asked for this."""
    told = job.tell_time
    if told is None:
        return prompt
    if not has_turns(prompt):
        if not told.is_asked:
            return prompt
        raise InvalidRequest(
            "tell_time, wind_down and tools_until need a chat, because a plain prompt has no turns:"
            " send messages",
            field="tell_time",
        )
    chat = chat_of(prompt)
    begun = job.arrived if job.run_began is None else job.run_began
    share = left_s / max(job.deadline.at - begun, left_s, 1e-3)
    last = chat.messages[-1]
    if last.role != "assistant":
        end = _FINISH if share <= told.wind_down else ""
        said = with_end(last, f"\n\n[{_about(left_s)} left for this task{end}.]")
        chat = replace(chat, messages=(*chat.messages[:-1], said))
    # If a grammar needs the tools, they must be called.
    is_free = job.grammar is None or job.grammar.kind is GrammarKind.STRUCTURAL_TAG
    if share <= told.tools_until and is_free:
        chat = replace(chat, tools=())
    return chat


def _about(left_s: float) -> str:
    seconds = ([0, *takewhile(lambda step: step <= left_s, _STEPS_S)])[-1]
    if not seconds:
        return "Less than a second is"
    count, unit = (seconds // 60, "minute") if seconds >= 60 else (seconds, "second")
    return f"About {count} {unit}{' is' if count == 1 else 's are'}"
