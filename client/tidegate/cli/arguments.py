"""Shared parts of the commands' arguments: types, options, help, and decorators."""

import math
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, TypeVar

import click

from tidegate.cli.runtime import importing

_F = TypeVar("_F", bound=Callable[..., object])


class Number(click.ParamType[float | int]):
    """A number between two bounds, whole by default."""

    def __init__(self, name: str, least: float, most: float, *, is_whole: bool = True) -> None:
        self.name = name
        self._least = least
        self._most = most
        self._is_whole = is_whole

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | int:
        try:
            number = int(value) if self._is_whole else float(value)
        except ValueError:
            kind = "whole number" if self._is_whole else f"number of {self.name}"
            self.fail(f"expected a {kind}, got {value!r}", param, ctx)
        if not self._least <= number <= self._most or number == math.inf:  # also catches NaN
            bound = f"most {self._most}" if number > self._most else f"least {self._least}"
            self.fail(f"must be at {bound}, got {value}", param, ctx)
        return number


PROCESSES = Number("number", 1, 64)
PORT = Number("port", 0, 65535)
SHARE = Number("percent", 0, 99)
POSITIVE = Number("number", 1, math.inf)
INSTANCES = Number("number", 1, 128)
SECONDS = Number("seconds", 0, math.inf, is_whole=False)


class Option(click.Option):
    """An option that may belong to a section of its command's help."""

    def __init__(self, *args: Any, section: str = "Options", **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.section = section


class Command(click.Command):
    """A command whose help keeps the line breaks of its source, and has options in sections."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write("\n" + (self.help or "").rstrip() + "\n")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.epilog:
            formatter.write("\n" + self.epilog.rstrip() + "\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(parameter, "section", "Options"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class Group(Command, click.Group):
    """A command that has sub-commands, most used first. With ``invoke_without_command`` it also
    runs by itself: then ``ctx.invoked_subcommand`` is None."""

    command_class = Command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_incomplete = not args and not self.invoke_without_command
        if is_incomplete and not ctx.resilient_parsing:  # not during shell completion
            ctx.fail("the following arguments are required: COMMAND")
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        super().format_options(ctx, formatter)


def option(*names: str, **settings: Any) -> Callable[[_F], _F]:
    """``click.option`` with sections, which shows environment variables and defaults, if any."""
    shown = settings.get("default") != ""
    return click.option(*names, cls=Option, show_default=shown, show_envvar=True, **settings)


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
