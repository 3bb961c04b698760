"""``python -m tools.prometheus_rule``: prints the alert rules as an object for the Prometheus
Operator, which is docker/kubernetes/components/monitoring/rules.yaml."""

import sys
import textwrap
from pathlib import Path

_RULES = Path(__file__).parents[1] / "docker" / "observability" / "alerts.yaml"
_HEAD = """\
# Written by `python -m tools.prometheus_rule` from docker/observability/alerts.yaml; a test fails
# when it is stale.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: tidegate
spec:
"""


def manifest() -> str:
    """The rules of docker/observability/alerts.yaml in a ``PrometheusRule``, as YAML."""
    _, key, groups = _RULES.read_text().partition("groups:\n")
    return _HEAD + textwrap.indent(key + groups, "  ")


if __name__ == "__main__":
    sys.stdout.write(manifest())
