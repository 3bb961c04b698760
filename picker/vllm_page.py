"""Reads load and pace from the metrics of vLLM and of Tidegate's ``/metrics/vllm``.

A page has thousands of lines, and a picker reads many pages, so it parses only the lines that it
uses.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

RUNNING: Final = "vllm:num_requests_running"
WAITING: Final = "vllm:num_requests_waiting"
_KV: Final = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
"""The share of KV blocks in use: its current and its older name."""
_CACHE: Final = "vllm:cache_config_info"
_LORAS: Final = "vllm:lora_requests_info"
_STEPS: Final = "vllm:iteration_tokens_total_count"
_GAPS: Final = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
"""Seconds between two tokens of an answer: its current and its older name."""
_TOKENS: Final = "vllm:generation_tokens_total"
_PROMPTS: Final = "vllm:prompt_tokens_total"
_WANTED = (
    RUNNING,
    WAITING,
    *_KV,
    _CACHE,
    _LORAS,
    _STEPS,
    *(f"{name}_{part}" for name in _GAPS for part in ("sum", "count")),
    _TOKENS,
    _PROMPTS,
)


class NotAPage(ValueError):
    """The page has no vLLM metrics; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class VllmPage:
    """One pod's metrics at one time. Totals count from the start of its process; totals of steps
    are 0 if the pod does not report them."""

    running: int
    waiting: int
    kv_used: float = 0.0
    """Share of KV blocks in use, 0 to 1: that of the fullest engine."""
    kv_blocks: int = 0
    models: frozenset[str] = frozenset()
    """Models and adapters that the pod reports."""
    steps: int = 0
    gaps: int = 0
    """Number of gaps between two tokens of an answer."""
    gaps_s: float = 0.0
    """Sum of those gaps, in seconds."""
    tokens: int = 0
    prompt_tokens: int = 0


def read_page(text: str) -> VllmPage:
    """Read a page in Prometheus' text format. Raises ``NotAPage``."""
    lines = [line for line in text.splitlines() if line.startswith(_WANTED)]
    sums: defaultdict[str, float] = defaultdict(float)
    most: defaultdict[str, float] = defaultdict(float)
    models: set[str] = set()
    blocks = 0
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                sums[sample.name] += sample.value
                most[sample.name] = max(most[sample.name], sample.value)
                models.update(_models_in(sample.name, sample.labels))
                if sample.name == _CACHE:
                    blocks += _count(sample.labels.get("num_gpu_blocks", ""))
        if RUNNING not in sums or WAITING not in sums:
            raise NotAPage(f"it has no {RUNNING if RUNNING not in sums else WAITING}")
        gaps = next((name for name in _GAPS if f"{name}_count" in sums), _GAPS[0])
        return VllmPage(
            running=max(0, round(sums[RUNNING])),
            waiting=max(0, round(sums[WAITING])),
            kv_used=min(1.0, max(0.0, *(most[name] for name in _KV))),
            kv_blocks=blocks,
            models=frozenset(models),
            steps=round(sums[_STEPS]),
            gaps=round(sums[f"{gaps}_count"]),
            gaps_s=sums[f"{gaps}_sum"],
            tokens=round(sums[_TOKENS]),
            prompt_tokens=round(sums[_PROMPTS]),
        )
    except NotAPage:
        raise
    except (ValueError, OverflowError) as error:
        raise NotAPage(f"it cannot be read: {error}") from None


def _models_in(name: str, labels: dict[str, str]) -> list[str]:
    if name == _LORAS:
        adapters = labels.get("running_lora_adapters", "").split(",")
        return [one.strip() for one in adapters if one.strip()]
    return [labels["model_name"]] if labels.get("model_name") else []


def _count(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0
