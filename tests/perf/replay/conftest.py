"""A real orchestrator in front of a fake worker."""

from tests.orchestrator.conftest import make_service, make_worker, service, worker

__all__ = ["make_service", "make_worker", "service", "worker"]
