"""vLLM's own arguments that docs/engines.md names, put through the parser of the real vLLM."""

import re
from pathlib import Path

import pytest

from tests.support.checkpoints import DEMO
from tests.support.real_vllm import skip_without_vllm
from worker.engines.vllm.arguments import engine_args
from worker.engines.vllm.library import load_library
from worker.environment import nested
from worker.settings import WorkerSettings, read_engine_args

pytestmark = pytest.mark.filterwarnings("default")  # of others' packages

PAGE = Path(__file__).parents[4] / "docs/engines.md"


def named_on_the_page() -> dict[str, str]:
    """The arguments in the page's table, by name, as an operator would give them."""
    table = PAGE.read_text().partition("\n### Passed through\n")[2].partition("\n### ")[0]
    found: dict[str, str] = {}
    for stated in re.findall(r"`(\w+=[^`]+)`", table):
        found |= read_engine_args(stated)
    return found


def test_the_page_names_arguments() -> None:
    """All of the table, and nothing of the sections behind it: the others here need vLLM."""
    assert sorted(named_on_the_page()) == [
        "enable_expert_parallel",
        "hf_overrides",
        "kv_cache_dtype",
        "kv_offloading_size",
        "max_model_len",
        "max_num_batched_tokens",
        "pipeline_parallel_size",
        "quantization",
        "speculative_config",
    ]


@pytest.mark.parametrize("name", named_on_the_page())
def test_vllm_knows_each_of_them_and_takes_its_value(name: str) -> None:
    skip_without_vllm()
    stated = {"model_path": DEMO, "engine": "vllm", "device": "cpu"}
    plain = WorkerSettings(**nested(stated))
    load_library(plain)
    given = WorkerSettings(**nested(stated | {"engine_args": {name: named_on_the_page()[name]}}))
    assert getattr(engine_args(given), name) != getattr(engine_args(plain), name)
