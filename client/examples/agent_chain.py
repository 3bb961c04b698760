"""An agent that makes four calls and keeps one promise: an answer within ten seconds.

    pip install tidegate-0.1.0-py3-none-any.whl     # make wheel
    python agent_chain.py "a fox who learns to sail" --url http://127.0.0.1:8080 --seconds 10

Every call in ``client.run`` states the run's deadline and how many calls follow (``calls_left``).
The service ranks each call by its share of the time left, so that the first calls do not use up
the time of the last. It stops no call before the run's deadline. ``on_deadline="fit"`` makes each
answer as long as its share allows. The model is told how much time is left, and finishes in the
last fifth. The conversation's KV cache is kept while the agent's tools run.

A tool gets at most a quarter of the time left. The run continues without a tool that hangs, as with
``--tool-seconds 60``. Time that a tool does not use goes to the calls.
"""

import argparse
import asyncio
import sys
from datetime import timedelta

from tidegate import Client, DeadlineExceeded, Message, ToolTimeout, remaining, tool_deadline

STEPS = (
    "Name three things that could happen in a story about {about}.",
    "Choose the best of them.",
    "Write the story in a few sentences.",
    "Give it a title.",
)


@tool_deadline(share=0.25)
async def use_a_tool(takes_s: float) -> None:
    """Stand in for a tool that the agent runs between two calls."""
    await asyncio.sleep(takes_s)


async def run(about: str, url: str, seconds: float, tool_s: float = 0.05) -> str:
    """Return the last answer. Raises ``DeadlineExceeded`` if the time is too short for it."""
    messages: list[Message] = []
    async with Client(url) as client:
        with client.run(timedelta(seconds=seconds)):
            for number, step in enumerate(STEPS):
                messages.append({"role": "user", "content": step.format(about=about)})
                answer = await client.generate(
                    messages,
                    idle_keep_s=30,
                    calls_left=len(STEPS) - 1 - number,
                    on_deadline="fit",
                    max_tokens=48,
                )
                left = f"{remaining() or 0:.1f} s left"
                print(f"call {number + 1} of {len(STEPS)}, {left}: {answer.text}")
                messages.append({"role": "assistant", "content": answer.text})
                if number + 1 < len(STEPS):
                    try:
                        await use_a_tool(tool_s)
                    except ToolTimeout as error:
                        print(f"continuing without a tool's result: {error}")
    return answer.text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("about", nargs="?", default="a fox who learns to sail")
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--seconds", type=float, default=10.0, help="for all calls together")
    parser.add_argument("--tool-seconds", type=float, default=0.05, help="time each tool takes")
    args = parser.parse_args()
    try:
        asyncio.run(run(args.about, args.url, args.seconds, args.tool_seconds))
    except DeadlineExceeded as error:
        print(f"the deadline cannot be met: {error}", file=sys.stderr)
        return 1
    print("kept")
    return 0


if __name__ == "__main__":
    sys.exit(main())
