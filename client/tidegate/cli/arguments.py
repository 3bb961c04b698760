"""Shared parts of the commands' arguments: types, options, help, and decorators."""

import math
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, TypeVar

import click

from tidegate.cli.runtime import importing

_F = TypeVar("_F", bound=Callable[..., object])


class Seconds(click.FloatRange):
    """A finite number of seconds, from 0."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"expected a finite number, got {value}", param, ctx)
        return seconds


PORT = click.IntRange(0, 65535)
SHARE = click.IntRange(0, 99)
POSITIVE = click.IntRange(1)
INSTANCES = click.IntRange(1, 128)
SECONDS = Seconds(0)


class Command(click.Command):
    """A command whose help keeps the line breaks of its source."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write("\n" + (self.help or "").rstrip() + "\n")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.epilog:
            formatter.write("\n" + self.epilog.rstrip() + "\n")


class Group(Command, click.Group):
    """A command that has sub-commands, most used first. With ``invoke_without_command`` it also
    runs by itself: then ``ctx.invoked_subcommand`` is None."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def option(*names: str, **settings: Any) -> Callable[[_F], _F]:
    """``click.option`` that shows environment variables and defaults, if any."""
    shown = settings.get("default") != ""
    return click.option(*names, show_default=shown, show_envvar=True, **settings)


def options(*decorators: Callable[[_F], _F]) -> Callable[[_F], _F]:
    """One decorator that adds options in this order."""

    def add(function: _F) -> _F:
        for one in reversed(decorators):
            function = one(function)
        return function

    return add


server_options = options(
    option(
        "--url",
        default="http://127.0.0.1:8080",
        envvar="TIDEGATE_URL",
        metavar="URL",
        help="the service",
    ),
    option("--token", envvar="TIDEGATE_TOKEN", help="bearer token", metavar="TOKEN"),
)
json_option = option("--json", "as_json", is_flag=True, help="for programs: JSON on stdout")


def on_catalog(
    kind: Literal["models", "engines"],
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Turn a function that takes this machine's catalog into a command with ``--json``."""

    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        @wraps(function)
        def run(**given: Any) -> int:
            with importing(serving=True):
                from catalog.engines import EngineCatalog
                from catalog.errors import ProvisionError
                from catalog.models import ModelCatalog
                from catalog.paths import state_dir
            catalog = (ModelCatalog if kind == "models" else EngineCatalog)(state_dir())
            try:
                return function(catalog, **given)
            except BrokenPipeError:  # main ends quietly
                raise
            except (ProvisionError, OSError) as error:  # a file may vanish while it is read
                print(f"{click.get_current_context().command_path}: {error}", file=sys.stderr)
                return 1

        return json_option(run)

    return decorate
