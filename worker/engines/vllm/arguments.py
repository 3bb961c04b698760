"""Turns our settings and ``TIDEGATE_WORKER__ENGINE_ARGS`` into vLLM's ``EngineArgs``."""

import json
import secrets
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final, NoReturn

from worker.engines.vllm.adapters import adapter_defaults
from worker.errors import BrokenCheckpoint
from worker.settings import WorkerSettings, variable

_CPU_STEP_TOKENS: Final = 2048
"""Tokens per step on the CPU if our ``max_step_tokens`` is unset. On CUDA, both sizes are then
vLLM's own, which depend on the GPU: 64 jobs and 2,048 tokens are slower than ``vllm serve``."""
_OURS: Final = frozenset(
    {
        "model",
        "tokenizer",
        "served_model_name",
        "skip_tokenizer_init",
        "runner",
        "generation_config",
        "kv_events_config",
        "data_parallel_size",
        "enable_lora",
        "max_loras",
        "stream_interval",
    }
)


def check_settings(settings: WorkerSettings) -> None:
    """Raise ``ValueError`` for settings of our own engine that vLLM does not support."""
    if settings.deterministic and settings.device == "cpu":
        name, why = "deterministic", "on the CPU its sums depend on what else is in a step"
    elif settings.kv.disk_path is not None:
        name, why = "kv.disk_path", "it has KV connectors of its own"
    else:
        return
    raise ValueError(f"{variable(name)} is not for the vllm engine: {why}")


def defaults(settings: WorkerSettings) -> dict[str, str]:
    """Our settings by vLLM's names, as text."""
    stated, on_cpu = settings.model_fields_set, settings.device == "cpu"
    found = {
        # vLLM's default seeds the whole process with 0: every start would draw the same texts.
        "seed": str(secrets.randbelow(2**31)),
        "max_model_len": "-1",  # as long as the model's context, or what its memory holds of it
        "enable_prefix_caching": json.dumps(settings.kv.prefix_cache),
        # If memory is short, the job with the latest deadline is preempted.
        "scheduling_policy": "priority",
        # Images are prepared here, for one engine; there is no video or audio input.
        "limit_mm_per_prompt": '{"video": 0, "audio": 0}',
        "mm_processor_cache_gb": "0",
    }
    if on_cpu or "max_running" in stated:
        found["max_num_seqs"] = str(settings.max_running)
    if on_cpu or "max_step_tokens" in stated:
        own = "max_step_tokens" in stated
        step_tokens = settings.max_step_tokens if own else _CPU_STEP_TOKENS
        found["max_num_batched_tokens"] = str(max(step_tokens, settings.max_running))
    if settings.dtype != "auto":
        found["dtype"] = settings.dtype
    if settings.tensor_parallel > 1:
        found["tensor_parallel_size"] = str(settings.tensor_parallel)
    if settings.kv.blocks:
        found["num_gpu_blocks_override"] = str(settings.kv.blocks)
    return found


def engine_args(settings: WorkerSettings) -> Any:
    """Make an ``EngineArgs``; vLLM must be installed. Raises ``ValueError`` for unknown names and
    values, and ``BrokenCheckpoint`` for adapters that do not fit."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise ValueError(f"TIDEGATE_WORKER__ENGINE_ARGS: vLLM says: {message}")

    parser = EngineArgs.add_cli_args(Parser(add_help=False))
    flags = {action.dest: list(action.option_strings) for action in parser._actions}
    check_names(settings.engine_args, flags)
    model = ["--model", str(settings.model_path), "--skip-tokenizer-init"]
    stated = defaults(settings) | adapter_defaults(settings) | settings.engine_args
    words = command_line(stated, flags)
    args = EngineArgs.from_cli_args(parser.parse_args(model + words))
    args.runner = "generate"
    args.generation_config = "vllm"
    args.kv_events_config = None
    return args


def engine_config(settings: WorkerSettings) -> Any:
    """Make a ``VllmConfig``. Raises ``ValueError``; ``BrokenCheckpoint`` if vLLM cannot run it."""
    from vllm.config.kv_events import KVEventsConfig
    from vllm.usage.usage_lib import UsageContext

    if not (settings.model_path / "config.json").is_file():
        raise BrokenCheckpoint(f"{settings.model_path}: no checkpoint, it has no config.json")
    args = engine_args(settings)
    if settings.kv.prefix_cache:
        args.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    try:
        # As ``vllm serve``: without a context a step has 128 sequences and 2,048 tokens anywhere.
        return args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except (ValueError, OSError) as error:
        raise BrokenCheckpoint(f"{settings.model_path}: vLLM does not take it: {error}") from error


def check_names(stated: Mapping[str, str], known: Mapping[str, list[str]]) -> None:
    """Raise ``ValueError`` for names that vLLM does not have or an operator may not set."""
    for name in stated:
        if name == "tensor_parallel_size":
            raise ValueError(
                f"TIDEGATE_WORKER__ENGINE_ARGS: for {name} set {variable('tensor_parallel')}, which"
                " the worker has to know itself"
            )
        if name in _OURS:
            raise ValueError(
                f"TIDEGATE_WORKER__ENGINE_ARGS: {name} is Tidegate's to set; leave it out"
            )
        if name not in known:
            near = get_close_matches(name, list(known), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"TIDEGATE_WORKER__ENGINE_ARGS: vLLM has no argument {name}{hint}")


def command_line(stated: Mapping[str, str], flags: Mapping[str, list[str]]) -> list[str]:
    """The settings as words for vLLM's own parser, which knows the types. Switches have an option
    for either value."""
    words = []
    for name, value in stated.items():
        options = flags[name]
        off = next((one for one in options if one.startswith("--no-")), None)
        on = next(one for one in options if one != off and one.startswith("--"))
        if off is not None and value.lower() in ("true", "1", ""):
            words.append(on)
        elif off is not None and value.lower() in ("false", "0"):
            words.append(off)
        else:
            words.append(f"{on}={value}")
    return words
