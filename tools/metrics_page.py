"""``python -m tools.metrics_page``: prints docs/metrics.md, the page of every metric."""

import asyncio
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from clips.section import ClipsSection
from orchestrator.api.operator.neighbours import VLLM_PREFIX
from orchestrator.api.server import build_runner
from orchestrator.build import build
from orchestrator.clock import LoopClock
from orchestrator.settings import whole_settings
from orchestrator.settings.sections import PlacementSettings
from orchestrator.sharing import make_sharing
from orchestrator.state.section import StateSection
from orchestrator.tasks.journal.file import JournalConfig, open_journal
from orchestrator.tasks.windows import LIKELY
from orchestrator.telemetry.metrics import (
    MAX_MODELS,
    MAX_TENANTS,
    MS_BUCKETS,
    PREFIX,
    US_BUCKETS,
    Declared,
)
from pool.fleet.metrics import POOL, pool_metrics

_PAGE = """\
# Metrics

`GET /metrics` on the orchestrator's port, in Prometheus' text format, without a token. Where keys
are set, only an admin's key sees the label `tenant`. Written by
`python -m tools.metrics_page > docs/metrics.md`; a test fails when it is stale.

Shares are 0 to 1. Codes in brackets name the promise that a metric watches. As OpenMetrics, buckets
of `tidegate_queue_ms`, `tidegate_ttft_ms`, `tidegate_total_ms` and the first two `gen_ai_server_…`
carry the `trace_id` of a sampled request. Labels take the first {tenants} tenants and {models}
models; later ones are `other`.

In each process `tidegate_offered_total` + `tidegate_recovered_total` = `tidegate_outcomes_total` +
`tidegate_journal_left` + live requests. A durable request is offered in one process, recovered in
later ones, and has its outcome in the last.

`stage` of `tidegate_misses_total` is the one to blame: `retry` if an instance did not finish it,
`queue` if it was never sent, `route` if the way took longest, `prediction` if its chance was
{likely:.0%} or more when it was sent, else the longest of `queue`, `prefill` and `decode`.

## The service

{service}

## In OpenTelemetry's names

`gen_ai.server.…` of the [conventions for generative AI][gen-ai], with their buckets.

[gen-ai]: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/

{standard}

## Under vLLM's names

For endpoint pickers and autoscalers that read vLLM's ([gateways.md](gateways.md)); `/metrics/vllm`
has these alone.

{vllm}

## Each instance

With the label `instance`, its gRPC address. What a worker reports comes with its heartbeats; its
counters start with the worker.

{instances}

Workers add no metrics of their own to Triton's. Triton's are on its metrics port, as in
[its documentation](https://github.com/triton-inference-server/server/blob/main/docs/user_guide/metrics.md).

## The pool manager

On loopback at `metrics_port` of `[pool]` ([pool.md](pool.md)), `name` as its file has it.

{pool}

## Buckets

- of milliseconds: {ms}
- of microseconds: {us}
"""


def page(declared: Iterable[Declared]) -> str:
    """The page of these metrics in Markdown, each list sorted by name."""
    lists = defaultdict[str, list[str]](list)
    for metric in sorted(declared, key=lambda metric: metric.name):
        lists[_list_of(metric)].append(_line(metric))
    return _PAGE.format(
        **{name: "\n".join(lines) for name, lines in lists.items()},
        tenants=MAX_TENANTS,
        models=MAX_MODELS,
        likely=LIKELY,
        ms=", ".join(f"{at:g}" for at in MS_BUCKETS),
        us=", ".join(f"{at:g}" for at in US_BUCKETS),
    )


def _list_of(metric: Declared) -> str:
    if metric.name in {PREFIX + row.name for row in POOL}:
        return "pool"
    if metric.name.startswith(PREFIX):
        return "instances" if "instance" in metric.labels else "service"
    return "vllm" if metric.name.startswith(VLLM_PREFIX) else "standard"


def _line(metric: Declared) -> str:
    labels = ",".join(label for label in metric.labels if label != "instance")
    name = metric.name + ("_total" if metric.type == "counter" else "")
    name += f"{{{labels}}}" if labels else ""
    return f"- `{name}` ({metric.type}, {metric.unit}): {metric.text}"


async def declared() -> list[Declared]:
    """The metrics of a service with every optional part enabled, and of a pool manager."""
    sections: dict[str, Any] = {
        "state": StateSection(url=SecretStr("redis://127.0.0.1")),
        "slots": ClipsSection(serve=True),
    }
    settings = whole_settings().model_construct(**sections, placement=PlacementSettings(policy="0"))
    clock = LoopClock(asyncio.get_running_loop())
    folder = await asyncio.to_thread(tempfile.TemporaryDirectory)
    config = JournalConfig(Path(folder.name) / "journal.db")
    file = await asyncio.to_thread(open_journal, config)
    rng = random.Random(0)
    sharing = await asyncio.to_thread(make_sharing, settings, rng, clock.unix)  # asks nobody
    parts = build(settings, clock, rng, file=file, sharing=sharing)
    build_runner(parts.orchestrator, parts.health, parts.discovery, parts.api, shutdown_timeout_s=0)
    await parts.lifecycle.close()
    await asyncio.to_thread(folder.cleanup)
    return [*parts.orchestrator.metrics.declared, *pool_metrics(dict).declared]


if __name__ == "__main__":
    sys.stdout.write(page(asyncio.run(declared())))
