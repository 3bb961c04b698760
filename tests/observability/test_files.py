"""PF-4: the alert rules and the dashboard hold what they promise, by the tools that load them."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
FILES = HERE.parents[1] / "docker" / "observability"
RULES, DASHBOARD = FILES / "alerts.yaml", FILES / "dashboard.json"
PAGE = (HERE.parents[1] / "docs" / "metrics.md").read_text()

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not here (Debian: apt install prometheus)"
)


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text())


def expressions(value: Any) -> Iterator[str]:
    """Every PromQL expression of a dashboard."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "expr":
                yield inner
            else:
                yield from expressions(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from expressions(inner)


@needs_promtool
def test_prometheus_takes_the_configuration_and_the_rules() -> None:
    promtool("check", "config", FILES / "prometheus.yaml")
    promtool("check", "rules", "--lint-fatal", RULES)


@pytest.mark.slow
@needs_promtool
def test_pf4_alerts_fire_when_they_should_and_only_then() -> None:
    promtool("test", "rules", HERE / "alerts_test.yaml")


@needs_promtool
def test_prometheus_understands_every_expression_of_the_dashboard(
    dashboard: Any, tmp_path: Path
) -> None:
    found = list(expressions(dashboard))
    assert len(found) > 30
    rules = [
        {
            "record": f"panel:expression:{number}",
            "expr": expr.replace("$__rate_interval", "1m").replace("$job", ".*"),
        }
        for number, expr in enumerate(found)
    ]
    assert not any("$" in rule["expr"] for rule in rules)
    file = tmp_path / "rules.yaml"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", file)


def test_what_they_name_is_there(dashboard: Any) -> None:
    """A metric that was renamed leaves a panel empty and an alert silent, and nobody is told."""
    text = "\n".join([RULES.read_text(), *expressions(dashboard)])
    known = set(re.findall(r"^- `(\w+)", PAGE, re.M))
    recorded = set(re.findall(r"record: (\S+)", text))
    for name in set(re.findall(r"\b(?:tidegate|gen_ai_server)[_:][\w:]+", text)):
        plain = re.sub(r"_(bucket|sum|count)$", "", name)
        assert name in known | recorded or plain in known, name
    labels = {
        name: set(told.split(","))
        for name, told in re.findall(r"^- `(\w+)(?:\{([\w,]*)\})?`", PAGE, re.M)
    }
    for name, matchers in re.findall(r"\b(tidegate_\w+)\{([^}]*)\}", text):
        known_labels = labels[re.sub(r"_(bucket|sum|count)$", "", name)]
        for label in re.findall(r"(\w+)\s*=", matchers):
            assert label in ("job", "le") or label in known_labels, (name, label)


def test_every_alert_of_pf4_is_there() -> None:
    alerts = re.findall(r"alert: (\w+).*?severity: (\w+)", RULES.read_text(), re.S)
    severity = dict(alerts)
    for name in ("Unavailable", "VerySlow", "Saturated", "InstanceFailing"):
        assert severity[f"Tidegate{name}"] == "critical"
    for name in ("Slow", "Busy", "OftenUnavailable", "KvDiskFails"):
        assert severity[f"Tidegate{name}"] == "warning"
