"""The command ``tidegate``. Nothing is imported that its command does not need."""

import argparse
import os
from collections.abc import Sequence

from tidegate.cli import serve, up
from tidegate.cli.arguments import Parser, positive
from tidegate.cli.interrupt import INTERRUPTED, importing

DESCRIPTION = """\
Deadline-keeping generation on NVIDIA Triton.

  tidegate up --device cpu               the demo model on this machine, no GPU needed
  tidegate up --model ~/models/llama     any Llama-family checkpoint directory, on the GPU
  tidegate up --instances 2 --gpus 0,1   two Tritons, one on each GPU
  tidegate chat                          talk to it
"""

CHAT_DESCRIPTION = """\
Talk to a model; the answer appears as it is generated.

  tidegate chat
  tidegate chat --url http://127.0.0.1:9000 --deadline-ms 2000
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit status."""
    try:
        args = _parser().parse_args(argv)
        status: int = args.run(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="tidegate", description=DESCRIPTION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up.add_to(commands)
    serve.add_to(commands)

    chat = commands.add_parser("chat", help="talk to a model", description=CHAT_DESCRIPTION)
    chat.set_defaults(run=_chat)
    chat.add_argument("--url", default="http://127.0.0.1:8080", help="server (%(default)s)")
    chat.add_argument("--model", help="a served model (the only one)")
    chat.add_argument(
        "--token", default=os.environ.get("TIDEGATE_TOKEN"), help="bearer token (TIDEGATE_TOKEN)"
    )
    chat.add_argument("--deadline-ms", type=positive, help="give every answer this long")
    chat.add_argument("--first-token-ms", type=positive, help="and its first token this long")
    chat.add_argument("--token-gap-ms", type=positive, help="then a token at least this often")
    return parser


def _chat(args: argparse.Namespace) -> int:
    with importing():
        import asyncio  # late, as all that takes long: Ctrl-C is handled from the first moment on

        from tidegate.cli import chat

    return asyncio.run(
        chat.run(
            args.url,
            args.model,
            args.token,
            args.deadline_ms,
            args.first_token_ms,
            args.token_gap_ms,
        )
    )
