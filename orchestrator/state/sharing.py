"""Makes an orchestrator's ``Sharing`` if the settings have a store."""

import random
from collections.abc import Callable

from orchestrator.ids import new_tag
from orchestrator.settings import Settings
from orchestrator.sharing import Sharing
from orchestrator.state.section import StateSection


def sharing_of(settings: Settings, rng: random.Random, unix: Callable[[], float]) -> Sharing | None:
    """The sharing that the settings configure; None if this orchestrator shares nothing."""
    state = settings.section(StateSection)
    if state.url is None:
        return None
    # Imported only when needed: the library is an extra.
    from orchestrator.state.connection import LEASE_S, StateConfig
    from orchestrator.state.shared_state import SharedState

    url = state.url.get_secret_value()
    config = StateConfig(url, state.prefix, LEASE_S, settings.journal.terms)
    return SharedState(config, new_tag(rng), unix, settings.host, state.advertise)
