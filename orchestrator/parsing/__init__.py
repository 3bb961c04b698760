"""What a model says, taken apart as it says it: reasoning, content, tool calls.

- ``parser``     one output, fed with text: pieces come out; ``collect`` makes a whole of them
- ``pieces``     what comes out
- ``formats``    which format a model speaks, told from its chat template
- ``calls``      tool calls in the formats of model families
- ``json_call``  a call as a JSON object that is not complete yet
- ``reasoning``  what stands in tags before the answer

A marker that the text so far only begins is held back; a call that is malformed becomes content.
"""

from orchestrator.parsing.formats import CallFormat, OutputFormat, format_of
from orchestrator.parsing.parser import Call, Output, OutputParser, collect
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
    "Call",
    "CallArguments",
    "CallBegins",
    "CallEnds",
    "CallFails",
    "CallFormat",
    "Content",
    "Output",
    "OutputFormat",
    "OutputParser",
    "Piece",
    "Reasoning",
    "collect",
    "format_of",
]
