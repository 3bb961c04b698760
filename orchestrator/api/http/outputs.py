"""Parses a model's output into content, reasoning and tool calls."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import msgspec
from aiohttp import web

from orchestrator.api.config import CONFIG
from orchestrator.api.http.context import CONTEXT
from orchestrator.errors import InvalidRequest
from orchestrator.parsing.call_grammar import calls_or_json, forced_calls, strict_calls
from orchestrator.parsing.formats import CallFormat, OutputFormat, calls_in
from orchestrator.parsing.parser import Output, OutputParser, ToolUse, collect
from orchestrator.parsing.pieces import CallArguments, Piece
from orchestrator.parsing.rules import AnswerGrammars, Rules, behind_thinking
from orchestrator.prompts.encoder import PROBE, WORD, PromptEncoder
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.job import Chat, Job, Prompt, PromptEnd
from orchestrator.tasks.task import Task
from orchestrator.tasks.transcript import Transcript
from protocol import Delta, FinishReason, Grammar, GrammarKind, InvalidGrammar

_THINKING = ("enable_thinking", "thinking")
"""Template arguments that turn thinking off."""
_AT_ONCE = 256
"""Tokens that are parsed together. Each tool call among them copies the rest of their text."""


class TaskOutput:
    """Parses one task's output: ``begin``, ``feed`` with each delta, ``finish``."""

    __slots__ = ("_encoder", "_format", "_parser", "_special", "_tools")

    def __init__(self, format: OutputFormat, encoder: PromptEncoder, tools: ToolUse | None) -> None:
        self._format = format
        self._encoder = encoder
        self._tools = tools
        # Special tokens have no text. Those that are markers get their text back.
        self._special = encoder.tokens.special_ids(format.markers)
        self._parser = self._new_parser("")

    @property
    def is_plain(self) -> bool:
        """Whether all output is content."""
        return self._format.calls is None and self._format.reasoning is None

    def begin(self, task: Task) -> None:
        """Prepare for a task that its worker has started. Its prompt is known then."""
        if self._format.reasoning is None:
            return
        if not _may_think(task.job, self._tools):
            self._format = replace(self._format, reasoning=None)
        self._parser = self._new_parser(self._encoder.tokens.end_of(task.token_ids))

    def feed(self, delta: Delta) -> Sequence[Piece]:
        """Parse new tokens. Some of their text may be held back."""
        texts = delta.texts
        if self._special:
            texts = list(map(self._text_of, delta.ids, texts))
        if len(texts) == 1:
            return self._parser.feed(texts[0])
        pieces: list[Piece] = []
        for at in range(0, len(texts), _AT_ONCE):
            pieces += self._parser.feed("".join(texts[at : at + _AT_ONCE]))
        return pieces

    def feed_token(self, token_id: int, text: str) -> Sequence[Piece]:
        """Parse one token. Some of its text may be held back."""
        return self._parser.feed(self._text_of(token_id, text))

    def finish(self, tail: str, ending: Ending) -> Sequence[Piece]:
        """Parse the rest of a task that ended without error; ``tail`` follows its last token."""
        return self._parser.finish(tail, is_cut=ending.finish_reason is not FinishReason.STOP)

    def whole(self, said: Transcript, tail: str, ending: Ending) -> Output:
        """Parse all of a task that ended without error; ``tail`` follows its last token."""
        pieces = self.feed(Delta(0, said.ids, said.texts))
        return collect([*pieces, *self.finish(tail, ending)])

    def is_calling(self, ending: Ending) -> bool:
        """Whether the task ended with tool calls and was not cut after some of them."""
        if not self._parser.calls_made:
            return False
        # Output after the only call is dropped, and its finish reason with it.
        only_one = self._tools is not None and self._tools.only_one_call
        return only_one or ending.finish_reason is FinishReason.STOP

    def _text_of(self, token_id: int, text: str) -> str:
        return text or self._special.get(token_id, "")

    def _new_parser(self, prompt_end: str) -> OutputParser:
        tools = self._tools
        return OutputParser(
            self._format,
            tools=None if tools is None else tools.schemas,
            only_one_call=tools is not None and tools.only_one_call,
            forced="" if tools is None else tools.forced,
            prompt_end=prompt_end,
        )


def format_of(app: web.Application, encoder: PromptEncoder) -> OutputFormat:
    """The format of a model's output, from its chat template and the settings."""
    formats = app[CONFIG].formats
    format = formats.of(encoder.card.chat_template)
    if format.calls is None or formats.tool_calls != "auto" or not encoder.knows_tools:
        return format
    written = encoder.written_call
    if reads(format, written):
        return format
    others = (replace(format, calls=calls) for calls in calls_in(encoder.card.chat_template))
    return next((one for one in others if reads(one, written)), replace(format, calls=None))


@lru_cache(maxsize=64)
def reads(format: OutputFormat, written: str) -> bool:
    """Whether a parser of ``format`` reads the template's tool calls: a marker in the template may
    be part of another one. ``written`` is the encoder's ``written_call``; empty if unknown."""
    if not written or format.calls is CallFormat.HARMONY:
        return True
    parser = OutputParser(replace(format, reasoning=None), tools={PROBE.name: None})
    arguments: dict[int, str] = {}
    for piece in (*parser.feed(written), *parser.finish()):
        if isinstance(piece, CallArguments):
            arguments[piece.index] = arguments.get(piece.index, "") + piece.json
    return any(WORD in one and _object(one) == PROBE.arguments for one in arguments.values())


def _object(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None


def output_of(
    app: web.Application, encoder: PromptEncoder, job: Job, tools: ToolUse | None
) -> TaskOutput:
    """Parser for one task's output."""
    format = format_of(app, encoder)
    if not (_may_think(job, tools) or job.prompt_ends):
        format = replace(format, reasoning=None)
    if tools is None and format.calls is not CallFormat.HARMONY:
        format = replace(format, calls=None)
    return TaskOutput(format, encoder, tools)


def _may_think(job: Job, tools: ToolUse | None) -> bool:
    """Whether the model may think first. Otherwise all output is the answer."""
    if job.grammar is None or job.grammar.kind is GrammarKind.STRUCTURAL_TAG:
        return True
    return bool(job.grammar.before) or (tools is not None and tools.must_call)


def in_form(
    request: web.Request, encoder: PromptEncoder, job: Job, chat: Prompt, use: ToolUse | None
) -> Job:
    """The request's job, with grammars for its answer in the model's own format: forced calls,
    calls that match a schema, the requested format after the thinking. Raises ``InvalidRequest`` if
    tool calls of the model cannot be distinguished from text."""
    if use is not None:
        job = _with_tools(request, encoder, job, chat, use)
        if use.must_call:
            return job
    if job.grammar is None or job.grammar.kind is GrammarKind.STRUCTURAL_TAG:
        return job
    format = format_of(request.app, encoder)
    rules = Rules(encoder.tokens.special_ids(format.markers))
    grammars = behind_thinking(job.grammar, format, rules)
    request[CONTEXT].grammars = tuple(filter(None, grammars))
    return _with_grammars(job, format, grammars, chat)


def _with_grammars(job: Job, format: OutputFormat, grammars: AnswerGrammars, chat: Prompt) -> Job:
    """The job with a grammar for each possible end of its prompt."""
    if format.reasoning is None or grammars.begun is None:
        return replace(job, grammar=grammars.usual)
    arguments = chat.template_arguments if isinstance(chat, Chat) else {}
    is_off = any(arguments.get(name) is False for name in _THINKING)
    return replace(
        job,
        grammar=grammars.over if is_off else grammars.usual,
        prompt_ends=(
            PromptEnd(format.reasoning.open, grammars.begun),
            PromptEnd(format.reasoning.close, grammars.over),
        ),
    )


def _with_tools(
    request: web.Request, encoder: PromptEncoder, job: Job, chat: Prompt, use: ToolUse
) -> Job:
    """The job, with a grammar if calls are forced or must match a schema."""
    name = encoder.name
    if not encoder.knows_tools:
        raise InvalidRequest(
            f"the chat template of {name!r} has no tools; leave them out, or use another model",
            field="tools",
        )
    format = format_of(request.app, encoder)
    if format.calls is None:
        raise InvalidRequest(
            f"the format of {name!r}'s tool calls is unknown; the operator can set it with "
            "TIDEGATE_MODELS__TOOL_FORMAT",
            field="tools",
        )
    if not encoder.card.grammars:
        if not use.must_call:
            return job
        raise InvalidRequest(
            f"tool calls of {name!r} cannot be forced: its worker does not enforce grammars; "
            "tool_choice must be auto or none",
            field="tool_choice",
        )
    rules = Rules(encoder.tokens.special_ids(format.markers))
    try:
        if not use.must_call:
            if job.grammar is None:
                grammar = strict_calls(use, format, rules)
            else:
                grammar = calls_or_json(job.grammar, use, format, rules)
            return job if grammar is None else replace(job, grammar=_checked(request, grammar))
        # Forced calls take precedence over a requested format: they leave no text.
        request[CONTEXT].grammars = ()
        forced = forced_calls(use, format, rules)
        for grammar in filter(None, forced):
            _checked(request, grammar)
    except InvalidGrammar as error:
        raise InvalidRequest(f"tools: {error}", field="tools") from None
    return _with_grammars(job, format, forced, chat)


def _checked(request: web.Request, grammar: Grammar) -> Grammar:
    """Check a grammar. Errors name the field ``tools``. Raises ``InvalidGrammar``."""
    context = request[CONTEXT]
    context.field_names = {**context.field_names, "grammar": "tools"}
    grammar.check()
    context.grammars = (*context.grammars, grammar)
    return grammar
