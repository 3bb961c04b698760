"""``tidegate chat``: one question and its answer, streamed as it is generated."""

import sys
from typing import TYPE_CHECKING, Any

import click

from tidegate.cli.arguments import POSITIVE, Command, option
from tidegate.cli.asking import asks
from tidegate.cli.terminal import CONTROL_CHARACTERS, print_json

if TYPE_CHECKING:
    from tidegate.client import Client
    from tidegate.requests import Message

DESCRIPTION = """\
Ask a model; the answer appears as it is generated.

  tidegate chat "Tell me a story."
  tidegate chat --url http://127.0.0.1:9000 --deadline-ms 2000 < question.txt

Ctrl-C cancels it, on the server too.
"""


def _said(ctx: click.Context, param: click.Parameter, words: tuple[str, ...]) -> str:
    """Read standard input here, because no event loop runs yet that would delay Ctrl-C."""
    if words or ctx.resilient_parsing:  # shell completion
        return " ".join(words)
    if sys.stdin.isatty() or not (question := sys.stdin.read().strip()):
        raise click.UsageError("give a question, as an argument or on standard input")
    return question


@click.command(cls=Command, help=DESCRIPTION, short_help="ask a model")
@click.argument("question", nargs=-1, callback=_said)
@option("--model", help="a served model (default: the only one)")
@option("--deadline-ms", "deadline", type=POSITIVE, help="deadline of the answer")
@option("--first-token-ms", "first_token", type=POSITIVE, help="deadline of its first token")
@option("--token-gap-ms", "token_gap", type=POSITIVE, help="longest gap between tokens")
@asks()
async def chat(client: "Client", question: str, as_json: bool, **given: Any) -> int:
    from tidegate.results import Token

    options = {name: value for name, value in given.items() if value is not None}
    options["temperature"] = 0.4  # small models babble at 1
    messages: list[Message] = [{"role": "user", "content": question}]
    if as_json:
        print_json(await client.generate(messages, **options))
        return 0
    has_begun = False
    try:
        async with client.stream(messages, **options) as events:
            async for event in events:
                if isinstance(event, Token):
                    has_begun = True
                    print(event.text.translate(CONTROL_CHARACTERS), end="", flush=True)
    finally:
        if has_begun:
            print()
    return 0
