"""Room for a model's thinking before an answer that a grammar determines.

What may be there depends on the prompt's end: a template may have begun the thinking, or ended it
at once to disable it::

    …<|assistant|>                        <think> thought </think> answer, or the answer at once
    …<|assistant|><think>                 thought </think> answer
    …<|assistant|><think></think>         answer
"""

from typing import NamedTuple

from orchestrator.parsing import harmony
from orchestrator.parsing.formats import CallFormat, OutputFormat
from orchestrator.parsing.rules import Rules
from protocol import Grammar

_SPACE = r'("\n" | "\n\n")?'
"""White space between the thinking and the answer."""


class Beginnings(NamedTuple):
    """Terms of a grammar for what precedes an answer; empty where nothing may."""

    usual: str = ""
    """Where the prompt has nothing of the thinking: the model may think."""
    begun: str | None = None
    """The prompt's end within the thinking; None for a format without it."""


class AnswerGrammars(NamedTuple):
    """Grammars of one answer, by what the prompt has of the model's thinking."""

    usual: Grammar
    begun: Grammar | None
    over: Grammar
    """Where the prompt ends behind the thinking."""


def beginnings(format: OutputFormat, rules: Rules) -> Beginnings:
    """What precedes an answer in ``format``, as terms that belong to ``rules``."""
    tags = format.reasoning
    if tags is None:
        return Beginnings()
    if format.calls is CallFormat.HARMONY:
        open = rules.spelled(harmony.CHANNEL, "analysis", harmony.MESSAGE)
        again = rules.spelled(harmony.START, "assistant")
        thought = f"{rules.text_up_to('thought', harmony.END)} {again}"
        return Beginnings(f"({open} {thought})? ")
    thought = f"{rules.text_up_to('thought', tags.close)} {_SPACE} "
    return Beginnings(f"({rules.spelled(tags.open)} {thought})? ", thought)


def behind_thinking(grammar: Grammar, format: OutputFormat, rules: Rules) -> AnswerGrammars:
    """A client's grammar for the answer alone; ``rules`` are those of a new grammar."""
    beginning, header = beginnings(format, rules), ""
    if format.calls is CallFormat.HARMONY:
        header = rules.spelled(harmony.CHANNEL, "final", harmony.MESSAGE)

    def after(start: str) -> Grammar:
        if not (start or header):
            return grammar
        return grammar.behind("\n".join([*rules.lines, f"before: {start}{header}"]) + "\n")

    begun = None if beginning.begun is None else after(beginning.begun)
    return AnswerGrammars(after(beginning.usual), begun, after(""))
