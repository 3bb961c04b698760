"""What the commands' arguments have in common, with errors that say what was expected."""

import argparse
from typing import TYPE_CHECKING

MOST_INSTANCES = 128
"""On one machine."""


class Parser(argparse.ArgumentParser):
    """Keeps the line breaks of descriptions, in subcommands too."""

    def __init__(self, **options: object) -> None:
        options["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(**options)  # type: ignore[arg-type]  # argparse's own options


if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Parser]
else:  # argparse has no public name for it
    Commands = object


def port(text: str) -> int:
    number = whole_number(text)
    if not 0 <= number < 65536:
        raise argparse.ArgumentTypeError(f"a port is from 0 to 65535, got {number}")
    return number


def positive(text: str) -> int:
    number = whole_number(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def instances(text: str) -> int:
    number = positive(text)
    if number > MOST_INSTANCES:
        raise argparse.ArgumentTypeError(f"must be at most {MOST_INSTANCES}, got {number}")
    return number


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None


def seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):  # also catches NaN
        raise argparse.ArgumentTypeError(f"must be seconds from 0 up, got {text!r}")
    return number
