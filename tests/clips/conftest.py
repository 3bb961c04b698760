"""The service of tests/orchestrator, for the room's tests."""

from tests.orchestrator.api.page.conftest import devtools  # noqa: F401
from tests.orchestrator.conftest import make_service, make_worker, service, worker  # noqa: F401
