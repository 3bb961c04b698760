"""Services with clips."""

from tests.clips.rig import make_service  # noqa: F401
from tests.orchestrator.conftest import no_blocking, short_pauses  # noqa: F401
