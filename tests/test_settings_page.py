"""docs/settings.md is the page of every setting, and is up to date."""

from pathlib import Path

from pydantic import BaseModel

from clips.render.settings import RenderSettings
from orchestrator.settings import OTHER_VARIABLES, KeySettings, whole_settings
from tests.support.cases import for_each
from tools.settings_page import page, rows_of
from worker.settings import WorkerSettings

KINDS = (whole_settings(), KeySettings, WorkerSettings, RenderSettings)
PAGE = Path(__file__).parents[1] / "docs" / "settings.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run python -m tools.settings_page > docs/settings.md"


def test_variables_that_are_not_settings_are_named() -> None:
    assert all(f"`{name}`" in page() for name in OTHER_VARIABLES if not name.endswith("_"))


def test_the_page_is_short() -> None:
    assert sum(len(list(rows_of(kind))) for kind in KINDS) <= 110


@for_each("kind", KINDS)
def test_every_setting_says_what_it_is(kind: type[BaseModel]) -> None:
    lacking = [row.name for row in rows_of(kind) if not row.meaning.endswith((".", ")"))]
    assert not lacking, "a docstring of one sentence or more is needed"
