"""Fixtures that start an orchestrator in front of stand-ins for workers."""

from tests.orchestrator.conftest import make_service, make_worker

__all__ = ["make_service", "make_worker"]
