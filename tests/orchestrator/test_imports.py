"""What the orchestrator imports before it listens, and what only when it is needed."""

import pytest

from tests.support.processes import python


@pytest.mark.slow
def test_starts_without_the_libraries_that_are_seldom_needed() -> None:
    """They would take longer than all else that it does before it listens."""
    probe = """if True:
        import sys
        import orchestrator.__main__

        seldom = {"grpc", "jinja2", "ml_dtypes", "rich", "torch", "transformers"}
        seldom |= {"cryptography", "opentelemetry", "redis", "pool.engines.environments"}
        sys.exit(", ".join(seldom & sys.modules.keys()) or 0)
    """
    assert python("-c", probe).stderr == ""
