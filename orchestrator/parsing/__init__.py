"""Parses a model's output as it comes: reasoning, content, tool calls.

- ``parser``     one output, fed with text: pieces come out; ``collect`` makes a whole of them
- ``pieces``     what comes out
- ``formats``    the format that a model uses, derived from its chat template
- ``calls``      tool calls in the formats of model families
- ``json_call``  a call as a JSON object, or between marks, that is not complete yet
- ``tagged_call``  one with each argument in tags
- ``harmony``    the format of gpt-oss: calls and reasoning in messages with headers
- ``reasoning``  the part in tags before the answer
- ``call_grammar``, ``rules``  grammars of calls that must be made, and of answers behind that part

Text that may begin a marker is held back; a malformed call becomes content.
"""

from orchestrator.parsing.formats import CallFormat, FormatConfig, OutputFormat, format_of
from orchestrator.parsing.parser import Output, OutputParser, ParsedCall, ToolUse, collect
from orchestrator.parsing.pieces import (
    CallArguments,
    CallBegins,
    CallEnds,
    CallFails,
    Content,
    Piece,
    Reasoning,
)

__all__ = [
    "CallArguments",
    "CallBegins",
    "CallEnds",
    "CallFails",
    "CallFormat",
    "Content",
    "FormatConfig",
    "Output",
    "OutputFormat",
    "OutputParser",
    "ParsedCall",
    "Piece",
    "Reasoning",
    "ToolUse",
    "collect",
    "format_of",
]
