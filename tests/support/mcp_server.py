"""A server of MCP whose tools are quick, slow, hang or die: ``mcp_server.py FOLDER [PORT]``.

Over stdio, or with a port over HTTP. Each thing that a test asks about is a line in a file of the
folder: ``started`` has the process's id, ``cancelled`` the tool's name.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp_types import SamplingMessage, TextContent

FOLDER = Path(sys.argv[1])
server = MCPServer("tools")


def note(file: str, line: object) -> None:
    with (FOLDER / file).open("a") as notes:
        notes.write(f"{line}\n")


@server.tool()
async def echo(text: str) -> str:
    return text


@server.tool()
async def left(context: Context) -> str:
    """What the request says is left for it."""
    meta = context.request_context.meta or {}
    return str(meta.get("tidegate/timeout_ms"))


@server.tool()
async def wait(seconds: float, context: Context) -> str:
    """Take a while, and stop when told to."""
    await context.report_progress(0, 1, "waiting")
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        note("cancelled", "wait")
        raise
    return "waited"


@server.tool()
async def hang() -> None:
    """Never end, whatever is said."""
    with anyio.CancelScope(shield=True):
        await anyio.sleep_forever()


@server.tool()
async def freeze() -> None:
    """Keep the whole process from doing anything else."""
    time.sleep(3600)  # noqa: ASYNC251


@server.tool()
async def die() -> None:
    os._exit(3)


@server.tool()
async def ask(question: str, context: Context) -> str:
    """Have the client's model answer."""
    said = SamplingMessage(role="user", content=TextContent(type="text", text=question))
    answer = await context.session.create_message([said], max_tokens=8)
    return f"it said {answer.content.text}"


@server.resource("note://one")
def one() -> str:
    return "a note"


if __name__ == "__main__":
    note("started", os.getpid())
    if len(sys.argv) > 2:
        server.run("streamable-http", port=int(sys.argv[2]))
    else:
        server.run()
