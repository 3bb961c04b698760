"""All commands, and the group that finds them. A command's imports run when the command runs."""

import click

from tidegate.cli.arguments import Group
from tidegate.cli.chat import chat
from tidegate.cli.doctor import doctor
from tidegate.cli.engines import engines
from tidegate.cli.models import models
from tidegate.cli.operate import drain, reload, swap
from tidegate.cli.pool import pool
from tidegate.cli.tasks import tasks
from tidegate.cli.up import picker, serve, up, worker

DESCRIPTION = """\
Deadline-keeping generation on NVIDIA Triton.

  tidegate up --device cpu               the demo model on this machine, no GPU needed
  tidegate up --model ~/models/llama     any Llama-family checkpoint directory, on the GPU
  tidegate up --instances 2 --gpus 0,1   two Tritons, one on each GPU
  tidegate pool run pool.toml            a machine's instances, as defined in a file
  tidegate chat "Tell me a story."       ask it
  tidegate models add ORG/NAME           download a model and verify every file
  tidegate doctor                        what this machine lacks, and how to fix it
"""

EPILOG = """\
exit status: 0 success, 1 failure (the reason is on stderr), 2 wrong usage, 130 Ctrl-C
"""


@click.group(
    cls=Group, help=DESCRIPTION, epilog=EPILOG, context_settings={"max_content_width": 100}
)
@click.version_option(package_name="tidegate", prog_name="tidegate")
def tidegate() -> None:
    pass


_FOR_USERS = (up, chat, models, engines, tasks, doctor)
_FOR_OPERATORS = (drain, swap, reload, serve, worker, picker, pool)
for command in (*_FOR_USERS, *_FOR_OPERATORS):
    tidegate.add_command(command)
