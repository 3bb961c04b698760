"""Each room serves a promise, and grows only in a commit that raises its number (OR-28)."""

import re
from pathlib import Path
from typing import NamedTuple

from tests.support.cases import for_each
from tests.test_layers import PACKAGES, ROOT

PAGE = (ROOT / "docs/architecture.md").read_text("utf-8")
PROMISE = re.compile(r"\b(?:DL|WP|LB|OR|WK|PV|SL|PF)-\d+\b")
TESTS = 66_000
"""Lines that the tests may have."""


class Room(NamedTuple):
    """A folder, or the modules right in one (``…/*.py``), as the page has it."""

    name: str
    promises: str
    most: int

    @property
    def files(self) -> list[Path]:
        folder, _, _ = self.name.partition("/*.py")
        here = self.name.endswith("/*.py")
        return sorted((ROOT / folder).glob("*.py") if here else (ROOT / folder).rglob("*.py"))


ROOMS = [
    Room(name, promises, int(most.replace(",", "")))
    for name, promises, most in re.findall(
        r"^\| `([\w/*.]+)`(?: \(optional\))? \| (.*?) \| ([\d,]+) \|$", PAGE, re.M
    )
]


def lines(files: list[Path]) -> int:
    return sum(len(file.read_text("utf-8").splitlines()) for file in files)


@for_each("room", ROOMS)
def test_a_room_serves_a_promise_and_is_no_larger_than_it_may_be(room: Room) -> None:
    assert PROMISE.search(room.promises)
    assert room.files
    assert lines(room.files) <= room.most, "say in the commit what left, and raise the number"


def test_every_module_is_in_one_room() -> None:
    housed = [file for room in ROOMS for file in room.files]
    ours = {
        file
        for package in (*PACKAGES, "model_repository")
        for file in (ROOT / package).rglob("*.py")
        if "node_modules" not in file.parts
    }
    assert sorted(housed) == sorted(ours)


def test_the_tests_are_no_more_than_they_may_be() -> None:
    assert lines([*(ROOT / "tests").rglob("*.py")]) <= TESTS
