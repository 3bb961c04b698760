"""What docker/proxies ships, as it is: where each recipe sends requests."""

import re
from pathlib import Path

from orchestrator.settings.sections import HealthSettings
from tests.support.cases import for_each
from tests.support.proxies import RECIPES

UPSTREAMS = re.compile(r"127\.0\.0\.1(?::|, port_value: )(\d+)")


@for_each("recipe", ["Caddyfile", "envoy.yaml", "haproxy.cfg", "nginx.conf"])
def test_no_request_is_sent_to_the_port_for_health_checks(recipe: str) -> None:
    """It is there by default, answers checks with 200, and serves nothing else."""
    ports = {int(port) for port in UPSTREAMS.findall(Path(RECIPES / recipe).read_text("utf-8"))}
    assert 8080 in ports and HealthSettings().port not in ports
