"""Share of agent runs that end with an answer by their deadline, with and without the time told to
the model (DL-24).

The agent calls its tool whenever its model asks for it. The model is a script with 100 tokens per
second. It looks things up until it has enough, is told to answer, or gets no tools. There are
twelve runs of each kind, in turns, one at a time.
"""

import json
import random
import tempfile
from pathlib import Path
from typing import Any, Final

from perf import SEED
from perf.load.connection import HOST
from perf.report.bundle import Figure
from perf.stack.context import Bench, BenchContext
from perf.stack.stack import StackSpec
from tidegate import Client, DeadlineExceeded, deadline

_SCRIPT: Final = """
step_ms = 10
[[answers]]
when = 'pack|less'
calls = [{ name = "look_up", arguments = { words = "the weather in Oslo" } }]
[[answers]]
when = 'enough|final answer'
text = "Take a coat and an umbrella."
[[answers]]
text = "That is all that I know: take a coat."
"""
_TOOL: Final = {
    "name": "look_up",
    "description": "Look something up.",
    "parameters": {"type": "object", "properties": {"words": {"type": "string"}}},
}
_ASKED: Final[dict[str, Any]] = {"role": "user", "content": "What should I pack for Oslo?"}
_RUNS, _MOST_LOOKS = 12, 16
_DEADLINE_S: Final = 5.0
_LAST: Final = 0.3
"""Share of it at which a told model is to answer, without tools: twice what a call takes."""


def _looked_up(arguments: str, found: str) -> list[dict[str, Any]]:
    function = {"name": "look_up", "arguments": arguments}
    call = {"id": "1", "type": "function", "function": function}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [asked, {"role": "tool", "tool_call_id": "1", "content": found}]


async def _ends_in_time(client: Client, looks: int, session: str, *, told: bool) -> bool:
    """Whether a run ends with an answer; after ``looks`` look-ups the tool says enough."""
    messages, tools = [_ASKED], [{"type": "function", "function": _TOOL}]
    telling = client.run(1000 * _DEADLINE_S, wind_down=_LAST, tools_until=_LAST)
    block = telling if told else deadline(_DEADLINE_S)
    try:
        with block:
            while True:
                answer = await client.chat("demo", messages, tools=tools, session_id=session)
                if not answer.tool_calls:
                    return block.remaining() > 0
                looks -= 1
                for call in answer.tool_calls:
                    messages += _looked_up(call.arguments, "Rain: enough." if looks < 1 else "less")
    except DeadlineExceeded:
        return False


async def run(context: BenchContext) -> list[Figure]:
    shares: dict[bool, list[float]] = {False: [], True: []}
    rng = random.Random(SEED)
    with tempfile.TemporaryDirectory(prefix="tidegate-agents-") as folder:
        script = Path(folder) / "answers.toml"
        script.write_text(_SCRIPT)
        more = {"TIDEGATE_WORKER__ENGINE_ARGS": json.dumps({"script": str(script)})}
        one_a_step = {"worker.runner.scripted._TOKENS_PER_STEP": 1}
        spec = StackSpec("synthetic-scripted", more=more, constants=one_a_step)
        stack = await context.stack(spec)
        async with Client(f"http://{HOST}:{stack.port}") as client:
            for turn in range(1 if context.quick else 3):
                looks = [rng.randint(1, _MOST_LOOKS) for _ in range(_RUNS)]
                for told, found in shares.items():
                    ended = [
                        await _ends_in_time(client, count, f"{turn}-{number}-{told}", told=told)
                        for number, count in enumerate(looks)
                    ]
                    found.append(sum(ended) / _RUNS)
    return [
        Figure.of(
            f"agents.{key}", f"runs that end with an answer in time, {what}", "", shares[told]
        )
        for key, what, told in (("plain", "not told", False), ("told", "told", True))
    ]


BENCH = Bench("agents", "an agent that is told the time, or not", run, 400, in_quick=False)
