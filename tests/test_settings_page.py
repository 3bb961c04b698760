"""docs/settings.md is the page of every setting, and is up to date."""

from pathlib import Path

from pydantic import BaseModel

from clips.render.settings import RenderSettings
from orchestrator.settings import KeySettings, whole_settings
from tests.support.cases import for_each
from tools.settings_page import page, rows_of
from worker.settings import WorkerSettings

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run python -m tools.settings_page > docs/settings.md"


@for_each("kind", [whole_settings(), KeySettings, WorkerSettings, RenderSettings])
def test_every_setting_says_what_it_is(kind: type[BaseModel]) -> None:
    lacking = [row.name for row in rows_of(kind) if not row.meaning.endswith((".", ")"))]
    assert not lacking, "a docstring of one sentence or more is needed"
