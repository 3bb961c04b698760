"""The command ``tidegate``: start-up and error output."""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidegate.cli.runtime import INTERRUPTED, importing

if TYPE_CHECKING:
    import click

USAGE = 2
FAILED = 1
_COMPLETION = "_TIDEGATE_COMPLETE"
"""Variable that a shell sets to ask for completions."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status. Raises ``SystemExit`` for help and wrong usage."""
    try:
        with importing():
            import click  # imported late, as all slow imports: Ctrl-C is already handled

            from tidegate.cli.commands import tidegate
        if _COMPLETION in os.environ:
            tidegate.main(prog_name="tidegate", complete_var=_COMPLETION)
        try:
            with tidegate.make_context(
                "tidegate", list(sys.argv[1:] if argv is None else argv)
            ) as ctx:
                status: int = tidegate.invoke(ctx) or 0
                sys.stdout.flush()
        except click.exceptions.Exit as end:
            raise SystemExit(end.exit_code) from None
        except click.UsageError as error:
            print(_usage(error), file=sys.stderr)
            raise SystemExit(USAGE) from None
        except click.ClickException as error:
            print(f"tidegate: {error.format_message()}", file=sys.stderr)
            return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe (`| head`); drop what is still buffered.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return status


def _usage(error: "click.UsageError") -> str:
    """One line for wrong usage: the command, the error, and where to get help. A command that
    lacks its sub-command shows all of its help."""
    import click

    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return error.message
    where = "tidegate" if error.ctx is None else error.ctx.command_path
    message = error.message
    if type(error) is click.BadParameter and (parameter := error.param) is not None:
        name = parameter.make_metavar(error.ctx) if error.ctx is not None else parameter.name
        if isinstance(parameter, click.Option):
            name = "/".join(parameter.opts)
        message = f"argument {name}: {message}"
    else:
        message = " ".join(error.format_message().split())
    return f"{where}: {message.rstrip('.')}; see {where} --help"
