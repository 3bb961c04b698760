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
from typing import TYPE_CHECKING, Any, Final

from perf import SEED
from perf.load.connection import HOST
from perf.report.bundle import Figure
from perf.stack.context import Bench, BenchContext
from perf.stack.stack import StackSpec
from tidegate import deadline, timeout_headers

if TYPE_CHECKING:
    from openai import AsyncOpenAI

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
_RUNS, _MOST_LOOKS, _DEADLINE_S = 12, 16, 5.0
_TELLING: Final = {"tell_time": True, "wind_down": 0.3, "tools_until": 0.3}
"""A told model is to answer, without tools, at this share of the time: twice what a call takes."""


async def _ends_in_time(client: "AsyncOpenAI", looks: int, session: str, *, told: bool) -> bool:
    """Whether a run ends with an answer; after ``looks`` look-ups the tool says enough."""
    from openai import InternalServerError

    messages: list[Any] = [{"role": "user", "content": "What should I pack for Oslo?"}]
    asked: dict[str, Any] = {"model": "demo", "tools": [{"type": "function", "function": _TOOL}]}
    asked["extra_body"] = {"session_id": session} | (_TELLING if told else {})
    with deadline(_DEADLINE_S) as block:
        while True:
            try:
                answer = await client.chat.completions.create(
                    messages=messages, extra_headers=timeout_headers(), **asked
                )
            except InternalServerError as error:
                if error.status_code != 504:
                    raise
                return False
            said = answer.choices[0].message
            if not said.tool_calls:
                return block.remaining() > 0
            messages.append(said.model_dump(exclude_none=True))
            looks -= 1
            found = "Rain: enough." if looks < 1 else "less"
            for call in said.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": found})


async def run(context: BenchContext) -> list[Figure]:
    from openai import AsyncOpenAI  # only this bench needs it, and it takes a second to import

    shares: dict[bool, list[float]] = {False: [], True: []}
    rng = random.Random(SEED)
    with tempfile.TemporaryDirectory(prefix="tidegate-agents-") as folder:
        script = Path(folder) / "answers.toml"
        script.write_text(_SCRIPT)
        more = {"TIDEGATE_WORKER__ENGINE_ARGS": json.dumps({"script": str(script)})}
        one_a_step = {"worker.runner.scripted._TOKENS_PER_STEP": 1}
        spec = StackSpec("synthetic-scripted", more=more, constants=one_a_step)
        stack = await context.stack(spec)
        url = f"http://{HOST}:{stack.port}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
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
