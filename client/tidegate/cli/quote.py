"""``tidegate quote``: its arguments."""

import sys

import click

from tidegate.cli.arguments import (
    TOKENS,
    Choice,
    Command,
    DurationMs,
    json_option,
    option,
    server_options,
)
from tidegate.cli.interrupt import importing
from tidegate.cli.lists import ask

DESCRIPTION = """\
The chance that a request is in time, by deadline, before it is sent.

  tidegate quote "Tell me a story." --max-tokens 200
  tidegate quote --prompt-tokens 3000 --deadline 2s
  tidegate quote --prompt-tokens 3000 --reserve 99 --hold 10s

A reserved deadline is held for one request of the same key that is no larger, and states it.
"""


@click.command(cls=Command, help=DESCRIPTION, short_help="a request's chance, before it is sent")
@click.argument("prompt", required=False)
@option("--prompt-tokens", type=TOKENS, help="length of a prompt, in place of the prompt")
@option("--max-tokens", type=TOKENS, help="most tokens of the answer; the service's own by default")
@option("--model", help="which model")
@option("--deadline", "deadline_ms", type=DurationMs(), help="say the chance by this one, too")
@option(
    "--reserve",
    type=Choice(["50", "90", "99"]),
    help="reserve the earliest deadline with this chance in percent",
)
@option("--hold", "hold_ms", type=DurationMs(), default="5s", help="how long it is reserved")
@server_options
@json_option
def quote(
    prompt: str | None,
    prompt_tokens: int | None,
    max_tokens: int | None,
    model: str | None,
    deadline_ms: float | None,
    reserve: str | None,
    hold_ms: float,
    url: str,
    token: str | None,
    as_json: bool,
) -> int:
    if (prompt is None) is (prompt_tokens is None):
        print("tidegate quote: name a prompt, or its length with --prompt-tokens", file=sys.stderr)
        return 2
    with importing():
        from tidegate.cli import quoting
        from tidegate.requests import TaskOptions
    options: TaskOptions = {}
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    if model is not None:
        options["model"] = model
    if deadline_ms is not None:
        options["deadline"] = deadline_ms
    wanted = quoting.WantedQuote(
        prompt, prompt_tokens, None if reserve is None else int(reserve) / 100, hold_ms, options
    )
    return ask("quote", url, token, lambda client: quoting.quote(client, wanted, as_json=as_json))
