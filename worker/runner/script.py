"""Scripted answers of the engine ``synthetic-scripted``, by prompt.

A script is a TOML file; docs/clients.md shows one. ``Script.answer`` picks the answer.
"""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec

DEFAULT_SCRIPT: Final = Path(__file__).resolve().with_name("script.toml")
"""A script that makes the calls and gives the answers that prompts request."""
_SILENT: Final = "The script has no answer to this."
_GROUP: Final = re.compile(r"\\([1-9])")


class ScriptedCall(msgspec.Struct, forbid_unknown_fields=True):
    """A tool call. ``arguments`` is a table, or a text that may be invalid JSON on purpose."""

    name: str
    arguments: dict[str, Any] | str = {}


class ScriptedAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """``text``, then ``calls``. ``when`` is a regular expression; an answer without it is used if
    no other answer matches. ``\\1`` … ``\\9`` in the answer stand for the expression's groups."""

    when: str = ""
    text: str = ""
    calls: list[ScriptedCall] = []


class _File(msgspec.Struct, forbid_unknown_fields=True):
    answers: Annotated[list[ScriptedAnswer], msgspec.Meta(min_length=1)]
    context_tokens: Annotated[int, msgspec.Meta(ge=64)] = 131_072
    step_ms: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class _Rule(NamedTuple):
    """An answer with its compiled expression, or None."""

    when: re.Pattern[str] | None
    answer: ScriptedAnswer


class Script:
    """The answers of one file. ``context_tokens`` is the model's context; ``step_ms`` is the
    minimum time of a step in milliseconds."""

    def __init__(self, text: bytes, origin: str) -> None:
        """Raises ``ValueError`` that names the file and the problem in it."""
        try:
            file = msgspec.toml.decode(text, type=_File)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ValueError(f"{origin}: {error}; docs/clients.md shows a script") from error
        self.text = text
        self.context_tokens = file.context_tokens
        self.step_ms = file.step_ms
        self._rules = [
            _rule(answer, f"{origin}: answers[{index}]")
            for index, answer in enumerate(file.answers)
        ]

    def answer(self, prompt: str, latest: str) -> str:
        """The text that answers a prompt; ``latest`` is the part since the model's last answer. The
        answer with the last match of ``when`` in ``latest`` wins. An answer with a call counts only
        if ``prompt`` names its tool in quotes or tags, as templates do.
        """
        best, said = -2, _SILENT
        for when, answer in self._rules:
            match = None
            if when is not None:
                match = next(reversed(list(when.finditer(latest))), None)
                if match is None:
                    continue
            start = -1 if match is None else match.start()
            calls = [
                ScriptedCall(_expand(call.name, match), _expanded(call.arguments, match))
                for call in answer.calls
            ]
            if start > best and all(_is_offered(call.name, prompt) for call in calls):
                best, said = start, _written(_expand(answer.text, match), calls)
        return said


def read_script(path: Path) -> Script:
    """Read the script ``path``. Raises ``ValueError`` that names the problem."""
    try:
        return Script(path.read_bytes(), str(path))
    except OSError as error:
        raise ValueError(
            f"{path}: the script cannot be read ({error.strerror}); name a TOML file"
        ) from error


def _rule(answer: ScriptedAnswer, where: str) -> _Rule:
    if not answer.text and not answer.calls:
        raise ValueError(f"{where} says nothing; give it text or calls")
    try:
        when = re.compile(answer.when) if answer.when else None
    except re.error as error:
        raise ValueError(f"{where}.when is not a regular expression: {error}") from error
    groups = when.groups if when is not None else 0
    for number in _GROUP.findall(json.dumps([answer.text, msgspec.to_builtins(answer.calls)])):
        if int(number) > groups:
            raise ValueError(f"{where} has \\{number}, but its `when` has {groups} groups in ()")
    return _Rule(when, answer)


def _expand(text: str, match: re.Match[str] | None) -> str:
    if match is None:
        return text
    return _GROUP.sub(lambda group: match.group(int(group[1])) or "", text)


def _expanded(value: Any, match: re.Match[str] | None) -> Any:
    """``value`` with the match's groups inserted into all of its strings."""
    if isinstance(value, str):
        return _expand(value, match)
    if isinstance(value, dict):
        return {key: _expanded(inner, match) for key, inner in value.items()}
    if isinstance(value, list):
        return [_expanded(inner, match) for inner in value]
    return value


def _is_offered(name: str, prompt: str) -> bool:
    return re.search(rf'[">]{re.escape(name)}["<]', prompt) is not None


def _written(text: str, calls: list[ScriptedCall]) -> str:
    """The answer in the format of Hermes and Qwen, which the demo model also uses. Arguments have
    the same spaces as in the grammars of required calls."""
    parts = [text] if text else []
    for call in calls:
        arguments = call.arguments
        try:
            value = json.loads(arguments) if isinstance(arguments, str) else arguments
            arguments = json.dumps(value, ensure_ascii=False)
        except ValueError:
            arguments = str(arguments)
        name = json.dumps(call.name, ensure_ascii=False)
        parts.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>')
    return "\n".join(parts)
