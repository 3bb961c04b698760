"""Services with clips."""

from tests.clips.rig import make_service  # noqa: F401
from tests.orchestrator.conftest import on_the_loop  # noqa: F401
