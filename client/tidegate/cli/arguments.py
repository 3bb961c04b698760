"""Types and options that the commands' arguments share; their errors say what was expected."""

import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

MAX_PROCESSES = 64
"""Most orchestrator processes at one port."""
MAX_INSTANCES = 128
"""Most Tritons on one machine."""

DEFAULT_URL = "http://127.0.0.1:8080"
CORS_HELP = (
    "web pages that may use it: https://ui.example,… or * for all (TIDEGATE_HTTP__CORS_ORIGINS)"
)

_F = TypeVar("_F", bound=Callable[..., object])


class Number(click.ParamType[float | int]):
    """A number between two bounds, ``complaint`` for one outside; whole unless told otherwise."""

    def __init__(
        self, name: str, least: float, most: float, complaint: str, *, is_whole: bool = True
    ) -> None:
        self.name = name
        self._least = least
        self._most = most
        self._complaint = complaint
        self._is_whole = is_whole

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | int:
        try:
            number = int(value) if self._is_whole else float(value)
        except ValueError:
            if self._is_whole:
                self.fail(f"expected a whole number, got {value!r}", param, ctx)
            number = math.nan
        if not self._least <= number <= self._most or number == math.inf:  # also catches NaN
            shown = value if self._is_whole else repr(value)
            self.fail(f"{self._complaint}, got {shown}", param, ctx)
        return number


PROCESSES = Number(
    "number", 1, MAX_PROCESSES, f"the number of processes is from 1 to {MAX_PROCESSES}"
)
PORT = Number("port", 0, 65535, "a port is from 0 to 65535")
SHARE = Number("percent", 0, 99, "must be percent from 0 to 99")
POSITIVE = Number("number", 1, math.inf, "must be at least 1")
SECONDS = Number("seconds", 0, math.inf, "must be seconds from 0 up", is_whole=False)
TOKENS = Number("number", 1, 10_000_000, "must be tokens from 1 to 10000000")

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|)")
_UNIT_MS = {"ms": 1.0, "s": 1000.0, "": 1000.0, "m": 60_000.0}


class DurationMs(click.ParamType[float]):
    """A time such as ``500ms``, ``2s``, ``1.5m``, or a number of seconds, as milliseconds."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        found = _DURATION.fullmatch(str(value).strip())
        ms = float(found[1]) * _UNIT_MS[found[2]] if found else 0.0
        if not 0 < ms < 1e10:
            self.fail(f"expected a time such as 2s, 500ms or 1.5m, got {value!r}", param, ctx)
        return ms


class Instances(Number):
    """Number of Tritons, from 1 to ``MAX_INSTANCES``."""

    def __init__(self) -> None:
        super().__init__("number", 1, math.inf, "must be at least 1")

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | int:
        number = super().convert(value, param, ctx)
        if number > MAX_INSTANCES:
            self.fail(f"must be at most {MAX_INSTANCES}, got {number}", param, ctx)
        return number


class Words(click.ParamType[tuple[str, ...]]):
    """Words between commas, as a tuple."""

    name = "words"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(filter(None, str(value).split(",")))


class Choice(click.Choice[str]):
    """One of a few words; the error names them all."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices:
            self.fail(
                f"invalid choice: {value!r} (choose from {', '.join(self.choices)})", param, ctx
            )
        return str(value)


class Option(click.Option):
    """An option that may belong to a section of its command's help."""

    def __init__(self, *args: Any, section: str = "Options", **options: Any) -> None:
        super().__init__(*args, **options)
        self.section = section


class _KeepsLines(click.Command):
    """A command whose help keeps the line breaks it was written with."""

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

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:  # not while a shell asks what could come
            ctx.fail("the following arguments are required: COMMAND")
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the sub-commands in the order in which they were added, most wanted first."""
        return list(self.commands)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        click.Command.format_options(self, ctx, formatter)


class GroupWithDefault(Group):
    """A command that does something by itself, and has sub-commands; ``ctx.invoked_subcommand``
    says which was given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return click.Group.parse_args(self, ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        Command.format_options(self, ctx, formatter)  # type: ignore[arg-type]


def option(*names: str, **settings: Any) -> Callable[[_F], _F]:
    """``click.option`` with sections, which shows defaults and environment variables."""
    return click.option(*names, cls=Option, show_default=True, **settings)


def server_options(function: _F) -> _F:
    """Add the options ``--url`` and ``--token``: which service to ask, and with which key."""
    function = option(
        "--token",
        envvar="TIDEGATE_TOKEN",
        show_envvar=True,
        help="bearer token",
        metavar="TOKEN",
    )(function)
    return option(
        "--url",
        default=DEFAULT_URL,
        envvar="TIDEGATE_URL",
        show_envvar=True,
        metavar="URL",
        help="the service",
    )(function)


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
