"""``tidegate mcp``: its arguments."""

import sys
from importlib.util import find_spec
from typing import Any

import click

from tidegate.cli.arguments import Command, option
from tidegate.cli.interrupt import importing
from tidegate.cli.plan import DurationMs

DESCRIPTION = """\
Put time limits on the tools of an MCP server: a proxy on stdin and stdout, in front of a command
or a URL.

  tidegate mcp -- npx -y some-mcp-server
  tidegate mcp --timeout 20s --tool search=5s -- python server.py
  tidegate mcp --header "Authorization: Bearer $KEY" https://mcp.example.com/mcp

A call that states what is left of its run, "tidegate/timeout_ms" in its _meta, has that long;
others have --timeout. At its end the server is told to stop, and the caller gets an error to go on
from. A server that dies is started again. All else passes unchanged.
"""


class ToolTime(click.ParamType[tuple[str, float]]):
    """A tool's name and its time in seconds, written as ``search=5s``."""

    name = "tool=time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, float]:
        tool, equals, time = str(value).partition("=")
        if not tool or not equals:
            self.fail(f"expected TOOL=TIME such as search=5s, got {value!r}", param, ctx)
        return tool, DurationMs().convert(time, param, ctx) / 1000


class Header(click.ParamType[tuple[str, str]]):
    """An HTTP header, written as ``Name: value``."""

    name = "name: value"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        header, colon, text = str(value).partition(":")
        if not header.strip() or not colon:
            self.fail('expected "Name: value"', param, ctx)  # without what may be a key
        return header.strip(), text.strip()


@click.command(
    cls=Command,
    help=DESCRIPTION,
    short_help="time limits for the tools of an MCP server",
    # What comes after the server's name is the server's.
    context_settings={"allow_interspersed_args": False},
)
@option(
    "--timeout",
    "timeout_ms",
    type=DurationMs(),
    default="60s",
    help="for a call that states no time, of a tool without one of its own",
)
@option("--no-timeout", is_flag=True, help="such a call may take as long as it likes")
@option(
    "--tool",
    "by_tool",
    type=ToolTime(),
    multiple=True,
    metavar="TOOL=TIME",
    help="for this tool, also where a call states more; may be repeated",
)
@option(
    "--header",
    "headers",
    type=Header(),
    multiple=True,
    metavar="NAME:VALUE",
    help="sent to a server behind a URL; may be repeated",
)
@click.argument("server", nargs=-1, required=True, type=click.UNPROCESSED)
def mcp(
    timeout_ms: float,
    no_timeout: bool,
    by_tool: tuple[tuple[str, float], ...],
    headers: tuple[tuple[str, str], ...],
    server: tuple[str, ...],
) -> int:
    if find_spec("mcp") is None:
        print(
            "tidegate mcp: the package mcp is not installed here: pip install mcp==2.3.0",
            file=sys.stderr,
        )
        return 1
    with importing():
        from tidegate.proxy.limits import CallLimits
        from tidegate.proxy.run import run
        from tidegate.proxy.servers import connector, is_url

    if is_url(server[0]) and len(server) > 1:
        print("tidegate mcp: a URL takes no arguments; options go before it", file=sys.stderr)
        return 2
    limits = CallLimits(None if no_timeout else timeout_ms / 1000, dict(by_tool))
    return run(connector(server, dict(headers)), limits)
