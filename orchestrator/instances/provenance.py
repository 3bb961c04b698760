"""Finds the entries of this machine's catalogs that an instance runs (PV-4).

An instance reports the digest of its model and the name and version of its engine; the catalogs
have the matching entries. Other machines' instances and unregistered models have none.
"""

import re
from typing import Final, NamedTuple

from catalog.engines import EngineCatalog
from catalog.errors import ProvisionError
from catalog.models import ModelCatalog, ModelState
from catalog.paths import state_dir
from protocol import ModelCard

_VERSION: Final = re.compile(r"[\w.+-]+")


class Provenance(NamedTuple):
    """Ids of catalog entries; empty if there are none."""

    model_entry: str = ""
    engine_entry: str = ""


UNKNOWN: Final = Provenance()


def provenance_of(card: ModelCard) -> Provenance:
    """The catalog entries of a card. Reads both catalogs, so do not call it on the event loop. An
    unreadable catalog counts as empty."""
    try:
        models = ModelCatalog(state_dir()).entries()
        engines = EngineCatalog(state_dir()).entries()
    except ProvisionError:
        return UNKNOWN
    versions = _VERSION.findall(card.engine_version)  # our own and the engine's
    return Provenance(
        next(
            (
                entry.id
                for entry in reversed(models)
                if entry.state is ModelState.ACTIVE and entry.digest == card.model_digest != ""
            ),
            "",
        ),
        next(
            (e.id for e in reversed(engines) if e.engine == card.engine and e.version in versions),
            "",
        ),
    )
