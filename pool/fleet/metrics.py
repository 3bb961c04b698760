"""Metrics of a pool manager, for Prometheus (docs/metrics.md)."""

import contextlib
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from catalog.errors import PortInUse
from orchestrator.telemetry.metrics import MetricRow, Metrics, Samples
from pool.fleet.home import Answer
from pool.supervise import UnitState

Read = Callable[[], Answer]
"""Returns the answer to ``status``, with ``hit_rate``."""


def _by_state(read: Read) -> Samples:
    states = [each["state"] for each in read()["instances"]]
    return [((state.value,), states.count(state.value)) for state in UnitState]


def _by_name(read: Read, what: str) -> Samples:
    return [((each["name"],), each[what]) for each in read()["instances"]]


POOL: tuple[MetricRow[Read], ...] = (
    MetricRow("gauge", "pool_instances", "instances", "Instances by state", _by_state, ("state",)),
    MetricRow(
        "counter",
        "pool_restarts",
        "starts",
        "Starts of an instance beyond its first (PV-1)",
        lambda read: _by_name(read, "restarts"),
        ("name",),
    ),
    MetricRow(
        "counter",
        "pool_heartbeat_misses",
        "heartbeats",
        "Heartbeats that an instance did not answer; three in a row, and it is down (PV-1)",
        lambda read: _by_name(read, "heartbeats_missed"),
        ("name",),
    ),
    MetricRow(
        "gauge",
        "pool_targets_failing",
        "targets",
        "Orchestrators that cannot be updated with the ready instances",
        lambda read: len(read()["targets_failing"]),
    ),
    MetricRow(
        "gauge",
        "preflight_cache_hit_rate",
        "share",
        "Looks at the GPUs' memory that an answer of this heartbeat was there for (PV-2)",
        lambda read: read()["hit_rate"],
    ),
)


def pool_metrics(read: Read) -> Metrics:
    """All metrics of a pool manager, in their own registry."""
    metrics = Metrics()
    metrics.watch(read, POOL)
    return metrics


@contextlib.asynccontextmanager
async def serving_metrics(metrics: Metrics, port: int) -> AsyncIterator[None]:
    """Serve ``GET /metrics`` on loopback. Raises ``PortInUse``."""

    async def scrape(request: web.Request) -> web.Response:
        body, content_type = await metrics.exposition(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    app = web.Application()
    app.add_routes([web.get("/metrics", scrape)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
        except OSError as error:
            raise PortInUse(
                f"cannot listen on 127.0.0.1:{port} for metrics: {error.strerror}; give another "
                "metrics_port in [pool]"
            ) from error
        yield
    finally:
        await runner.cleanup()
