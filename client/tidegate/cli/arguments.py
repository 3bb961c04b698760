"""Shared parts of the commands' arguments: types, options, completion, and decorators."""

import math
import sys
from collections.abc import Awaitable, Callable
from functools import partial, wraps
from typing import Any, Literal, TypeVar

import click

from tidegate.cli.runtime import importing

MAX_PROCESSES = 64
"""Maximum number of orchestrator processes on one port."""
MAX_INSTANCES = 128
"""Maximum number of Tritons on one machine."""

DEFAULT_URL = "http://127.0.0.1:8080"
CORS_HELP = (
    "web pages that may use it: https://ui.example,… or * for all (TIDEGATE_HTTP__CORS_ORIGINS)"
)


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


PROCESSES = Number("number", 1, MAX_PROCESSES)
PORT = Number("port", 0, 65535)
SHARE = Number("percent", 0, 99)
POSITIVE = Number("number", 1, math.inf)
INSTANCES = Number("number", 1, MAX_INSTANCES)
SECONDS = Number("seconds", 0, math.inf, is_whole=False)


class Words(click.ParamType[tuple[str, ...]]):
    """Words separated by commas, as a tuple."""

    name = "words"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(filter(None, str(value).split(",")))


class Option(click.Option):
    """An option that may belong to a section of its command's help."""

    def __init__(self, *args: Any, section: str = "Options", **options: Any) -> None:
        super().__init__(*args, **options)
        self.section = section


class _KeepsLines(click.Command):
    """A command whose help keeps the line breaks of its source."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write("\n" + (self.help or "").rstrip() + "\n")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.epilog:
            formatter.write("\n" + self.epilog.rstrip() + "\n")


class Command(_KeepsLines):
    """A command whose help lists its options under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(parameter, "section", "Options"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class Group(_KeepsLines, click.Group):
    """A command that has sub-commands."""

    command_class = Command

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"no_args_is_help": False} | settings)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:  # not during shell completion
            ctx.fail("the following arguments are required: COMMAND")
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the sub-commands in the order in which they were added, most used first."""
        return list(self.commands)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        click.Command.format_options(self, ctx, formatter)


class GroupWithDefault(Group):
    """A group that also runs by itself, if ``ctx.invoked_subcommand`` is None."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return click.Group.parse_args(self, ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        Command.format_options(self, ctx, formatter)  # type: ignore[arg-type]


def option(*names: str, **settings: Any) -> Callable[[_F], _F]:
    """``click.option`` with sections, which shows environment variables and defaults, if any."""
    shown = settings.get("default") != ""
    return click.option(*names, cls=Option, show_default=shown, show_envvar=True, **settings)


def server_options(function: _F) -> _F:
    """Add the options ``--url`` and ``--token``: which service to ask, and with which key."""
    token = option("--token", envvar="TIDEGATE_TOKEN", help="bearer token", metavar="TOKEN")
    url = option(
        "--url", default=DEFAULT_URL, envvar="TIDEGATE_URL", metavar="URL", help="the service"
    )
    return url(token(function))


def processes_option(function: _F) -> _F:
    return option(
        "--processes",
        type=PROCESSES,
        default=1,
        metavar="N",
        help="orchestrator processes that share the port, one for each core at most "
        "(docs/fleet.md)",
    )(function)


def json_option(function: _F) -> _F:
    return option("--json", "as_json", is_flag=True, help="for programs: JSON on stdout")(function)


def asks(
    *, operates: bool = False
) -> Callable[[Callable[..., Awaitable[int]]], Callable[..., int]]:
    """Turn a function that takes a client into a command with ``--url``, ``--token`` and
    ``--json``. With ``operates`` it uses the operators' key, if the service keeps one here.
    """

    def decorate(function: Callable[..., Awaitable[int]]) -> Callable[..., int]:
        @wraps(function)
        def run(url: str, token: str | None, **given: Any) -> int:
            with importing():
                from tidegate.cli import asking
            command = click.get_current_context().command_path
            action = partial(function, **given)
            return asking.ask(command, url, token, action, operates=operates)

        return server_options(json_option(run))

    return decorate


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
