"""Which provider serves a stage: the one that the settings name."""

import pytest

from clips.render.settings import RenderSettings
from clips.render.stages.providers import load_providers
from tests.clips.render.fakes import CPU
from worker.errors import LoadError


def test_an_unknown_name_is_a_load_error() -> None:
    with pytest.raises(
        LoadError, match="TIDEGATE_SLOT__PORTRAIT: no provider 'x'; available: proc"
    ):
        load_providers(CPU, RenderSettings(portrait="x"))
