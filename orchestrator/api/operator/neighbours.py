"""Metrics with vLLM's names, for its dashboards.

Endpoint pickers and autoscalers read these metrics, according to the "model server protocol" that
llm-d's router follows (https://github.com/kubernetes-sigs/gateway-api-inference-extension/tree/
main/docs/proposals/003-model-server-protocol).
"""

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from orchestrator.service import Orchestrator
from orchestrator.tasks.work import Stage
from orchestrator.telemetry.metrics import MetricRow, Samples

VLLM_PREFIX = "vllm:"


def _models(orchestrator: Orchestrator) -> list[str]:
    """Names of the served models, without adapters."""
    known = orchestrator.models.by_name()
    return [name for name, encoder in known.items() if encoder.adapter is None]


def _tasks(stages: Collection[Stage]) -> Callable[[Orchestrator], Samples]:
    """Number of tasks in one of ``stages``, by model; 0 for a served model without tasks."""

    def read(orchestrator: Orchestrator) -> Samples:
        counts = dict.fromkeys(_models(orchestrator), 0)
        for task in orchestrator.live():
            model = task.model or task.job.model
            if model in counts and task.stage in stages:
                counts[model] += 1
        return (((model,), count) for model, count in counts.items())

    return read


class _KvCache(NamedTuple):
    """The KV blocks of all instances of a model, as far as they are known."""

    model: str
    block_tokens: int
    used: int
    total: int


def _kv_caches(orchestrator: Orchestrator) -> Iterator[_KvCache]:
    known = [(one.card, one.stats) for one in orchestrator.registry]
    told = [(card, stats) for card, stats in known if card and stats and stats.kv_blocks_total]
    for model in _models(orchestrator):
        if own := [(card, stats) for card, stats in told if card.model == model]:
            used = sum(stats.kv_blocks_used for _, stats in own)
            total = sum(stats.kv_blocks_total for _, stats in own)
            yield _KvCache(model, own[0][0].block_tokens, used, total)


def _kv_usage(orchestrator: Orchestrator) -> Samples:
    return (((cache.model,), cache.used / cache.total) for cache in _kv_caches(orchestrator))


def _cache_config(orchestrator: Orchestrator) -> Samples:
    for model, block_tokens, _, total in _kv_caches(orchestrator):
        yield (model, str(block_tokens), str(total)), 1.0


def _loras(orchestrator: Orchestrator) -> Samples:
    known = orchestrator.models.by_name()
    adapters = [name for name, encoder in known.items() if encoder.adapter is not None]
    return [((str(len(adapters)), ",".join(adapters), ""), orchestrator.clock.unix())]


_USAGE = "Share of KV blocks in use, over all instances of the model"


def _of_model(
    name: str, unit: str, text: str, read: Callable[[Orchestrator], Samples]
) -> MetricRow[Orchestrator]:
    return MetricRow("gauge", name, unit, text, read, ("model_name",))


VLLM: tuple[MetricRow[Orchestrator], ...] = (
    _of_model("num_requests_running", "requests", "Running requests", _tasks((Stage.RUNNING,))),
    _of_model(
        "num_requests_waiting",
        "requests",
        "Waiting requests, here or on an instance",
        _tasks((Stage.RECEIVED, Stage.QUEUED, Stage.DISPATCHED)),
    ),
    _of_model(
        "kv_cache_usage_perc",
        "share",
        f"{_USAGE}; 1 means all; cached blocks count as free",
        _kv_usage,
    ),
    _of_model("gpu_cache_usage_perc", "share", f"{_USAGE}, under its older name", _kv_usage),
    MetricRow(
        "gauge",
        "cache_config_info",
        "1",
        "Tokens per KV block, and number of blocks",
        _cache_config,
        ("model_name", "block_size", "num_gpu_blocks"),
    ),
    MetricRow(
        "gauge",
        "lora_requests_info",
        "s",
        "Served LoRA adapters, all of them loaded; the value is the Unix time",
        _loras,
        ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    ),
)
