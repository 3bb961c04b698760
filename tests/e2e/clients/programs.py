"""The clients of docs/clients.md: which program shows what of them, and with which packages."""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from catalog.paths import state_dir

HERE = Path(__file__).parent
OURS = Path(sys.executable)
"""The interpreter of this environment, with the SDKs that constraints.txt has."""
THEIRS = state_dir() / "clients" / "bin" / "python"
"""The interpreter with the packages of requirements.txt."""
NODE_MODULES = HERE / "node_modules"


class Program(NamedTuple):
    """A program, the interpreter that runs it, and the packages whose versions count."""

    interpreter: Path
    file: str
    packages: tuple[str, ...]

    def versions(self) -> list[str]:
        """Installed versions of its packages."""
        ask = (
            "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
        )
        command = [self.interpreter, "-c", ask, *self.packages]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


class NodeProgram(NamedTuple):
    """A program for Node, and the packages whose versions count."""

    file: str
    packages: tuple[str, ...]

    def versions(self) -> list[str]:
        """Installed versions of its packages."""
        files = [NODE_MODULES / name / "package.json" for name in self.packages]
        return [json.loads(file.read_text())["version"] for file in files]


class Client(NamedTuple):
    """A row of the table in docs/clients.md."""

    name: str
    shows: str
    programs: tuple[Program | NodeProgram, ...]


def _theirs(file: str, package: str) -> Program:
    return Program(THEIRS, file, (package,))


CLIENTS = (
    Client(
        "`openai` (Python)",
        "chats, completions and Responses, streamed and not; `n`, several prompts,"
        " log-probabilities, running usage; JSON schemas; tools forced and gone on from; `echo`"
        " with log-probabilities; a timeout as a deadline; an overflow by its code",
        (Program(OURS, "with_openai.py", ("openai",)), _theirs("with_openai.py", "openai")),
    ),
    Client(
        "`openai` (JavaScript)",
        "chats and Responses, streamed and not; the timeout of a call as a deadline",
        (NodeProgram("with_openai.mjs", ("openai",)),),
    ),
    Client(
        "`anthropic` (Python)",
        "messages, streamed and not; counted tokens; tools and their results; errors",
        (
            Program(OURS, "with_anthropic.py", ("anthropic",)),
            _theirs("with_anthropic.py", "anthropic"),
        ),
    ),
    Client(
        "LiteLLM",
        "as `openai/…`, `hosted_vllm/…` and `anthropic/…`; streams, tools, JSON schemas,"
        " Responses; an overflow is `ContextWindowExceededError`",
        (_theirs("with_litellm.py", "litellm"),),
    ),
    Client(
        "`langchain-openai`",
        "chats and Responses, streamed, in batches; tools; structured output by function calling"
        " and by JSON schema",
        (_theirs("with_langchain.py", "langchain-openai"),),
    ),
    Client(
        "Pydantic AI",
        "agents over chats and Responses; output types, by tools and by JSON schema; tools",
        (_theirs("with_pydantic_ai.py", "pydantic-ai-slim"),),
    ),
    Client(
        "`instructor`",
        "a Pydantic model, by tools and by JSON schema",
        (_theirs("with_instructor.py", "instructor"),),
    ),
    Client(
        "`openai-agents`",
        "a conversation by its items and by `previous_response_id`; an output type; tools,"
        " streamed and not",
        (_theirs("with_agents.py", "openai-agents"),),
    ),
    Client(
        "AI SDK (`ai`, `@ai-sdk/openai`)",
        "chats and Responses, streamed and not; structured output; tools",
        (NodeProgram("with_ai.mjs", ("ai", "@ai-sdk/openai")),),
    ),
)
