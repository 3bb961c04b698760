"""``tidegate doctor``: whether the service that runs here should have more instances, or fewer.

The gauge ``tidegate_instances_needed`` says what the load of this moment needs. Beside it the rules
are those of the alerts (docker/observability/alerts.yaml, group ``tidegate-advice`` and PF-4's
warnings), over all that the service counted since it started: alerts look at the last minutes, and
are the better judge where Prometheus runs.

Imported after ``runtime.add_to_path``, which finds ``pool``.
"""

import urllib.error
import urllib.request

from pool.preflight.checkup import Finding, Verdict
from pool.process.ports import host_port
from tidegate import _clock
from tidegate.cli.scrape import Samples
from tidegate.cli.terminal import duration, share

_TIMEOUT_S = 2.0
_UNAVAILABLE, _MISSED_BY_QUEUE = 0.05, 0.005
_SLOW_MS = 3000.0
_WAIT_SHARE = 0.25
"""Share of an answer's time that waiting may take."""
_ENOUGH = 100
"""Least number of answers that say something."""
_NEEDED = "tidegate_instances_needed"


def look(host: str, port: int) -> Finding | None:
    """Judge the service that listens there; None where none does, or none of ours."""
    try:
        with urllib.request.urlopen(
            f"http://{host_port(host, port)}/metrics", timeout=_TIMEOUT_S
        ) as answer:
            text = answer.read().decode()
    except (OSError, ValueError):  # urllib's own errors are OSErrors
        return None
    samples = Samples.parse(text, _clock.now())
    return judge(samples) if _NEEDED in samples.values else None


def judge(samples: Samples) -> Finding:
    """Advice from one scrape."""
    answers = samples.total("tidegate_http_responses_total") or 0.0
    instances = len(samples.by("tidegate_instance_slots", "instance"))
    # Several processes at one port each tell of all instances.
    needed = round(sum(samples.most(_NEEDED, "model").values()))
    found = f"the present load needs {needed} of {instances}"
    reasons = _reasons_to_add(samples, answers)
    if needed > instances:
        reasons.insert(0, f"the present load needs {needed}, and there are {instances}")
    if reasons:
        advice = f"add {max(1, needed - instances)}"
        return Finding("instances", Verdict.WARN, "; ".join(reasons), advice)
    if needed < instances and answers >= _ENOUGH:
        advice = f"{needed} would do, if it has not been busier than now"
        return Finding("instances", Verdict.OK, found, advice)
    return Finding("instances", Verdict.OK, found)


def _reasons_to_add(samples: Samples, answers: float) -> list[str]:
    reasons: list[str] = []
    if answers < _ENOUGH:
        return reasons
    unavailable = sum(
        samples.total("tidegate_http_responses_total", status=status) or 0.0
        for status in ("503", "529")
    )
    if unavailable > _UNAVAILABLE * answers:
        reasons.append(f"{share(unavailable / answers)} of answers were 503")
    total_ms = samples.quantile("tidegate_total_ms", 0.95) or 0.0
    if total_ms > _SLOW_MS:
        reasons.append(f"one request in twenty took more than {duration(_SLOW_MS)}")
    wait_ms = samples.quantile("tidegate_queue_ms", 0.95) or 0.0
    missed = samples.total("tidegate_misses_total", stage="queue") or 0.0
    if wait_ms > _WAIT_SHARE * total_ms and missed > _MISSED_BY_QUEUE * answers:
        reasons.append(f"{missed:.0f} requests missed their deadline because they waited")
    return reasons
