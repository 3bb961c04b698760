"""The tests' own way to try many cases with the same fixtures."""

import pytest

from tests.support.cases import for_each

SEEN: list[tuple[int, str]] = []
CROSSED: list[str] = []


@pytest.fixture
def letter() -> str:
    return "a"


@for_each("number", [1, 2, 3])
async def test_each_case_is_tried_with_the_fixtures(letter: str, number: int) -> None:
    assert len(SEEN) == number - 1
    SEEN.append((number, letter))


async def test_a_failure_names_its_case() -> None:
    @for_each(("left", "right"), [(1, 1), (1, 2), (3, 3)])
    async def are_equal(left: int, right: int) -> None:
        assert left == right

    with pytest.raises(AssertionError) as caught:
        await are_equal()
    assert caught.value.__notes__ == ["in the case (1, 2)"]


@for_each("letter", "ab")
@for_each("number", [1, 2])
def test_cases_of_plain_tests_can_be_crossed(letter: str, number: int) -> None:
    CROSSED.append(f"{letter}{number}")
    assert ["a1", "a2", "b1", "b2"][: len(CROSSED)] == CROSSED
