"""The service of tests/orchestrator, for tests with a real orchestrator."""

from tests.orchestrator.conftest import (  # noqa: F401
    make_service,
    make_worker,
    on_the_loop,
    service,
    worker,
)
