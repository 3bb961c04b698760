"""``tidegate chat``: its arguments."""

import click

from tidegate.cli.arguments import POSITIVE, Command, json_option, option, server_options
from tidegate.cli.completing import model_names
from tidegate.cli.interrupt import importing

DESCRIPTION = """\
Talk to a model; the answer appears as it is generated.

  tidegate chat
  tidegate chat --url http://127.0.0.1:9000 --deadline-ms 2000
  echo 'Tell me a story.' | tidegate chat --json
"""


@click.command(cls=Command, help=DESCRIPTION, short_help="talk to a model")
@server_options
@option("--model", help="a served model (the only one)", shell_complete=model_names)
@option("--deadline-ms", type=POSITIVE, help="give every answer this long")
@option("--first-token-ms", type=POSITIVE, help="and its first token this long")
@option("--token-gap-ms", type=POSITIVE, help="then a token at least this often")
@json_option
def chat(
    url: str,
    token: str | None,
    model: str | None,
    deadline_ms: int | None,
    first_token_ms: int | None,
    token_gap_ms: int | None,
    as_json: bool,
) -> int:
    with importing():
        import asyncio

        from tidegate.cli import chat

    run = chat.run_json if as_json else chat.run
    try:
        return asyncio.run(run(url, model, token, deadline_ms, first_token_ms, token_gap_ms))
    except ValueError as error:  # a URL that is none
        raise click.ClickException(f"{error}; see --url") from error
