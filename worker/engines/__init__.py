"""Loads the engine that runs the model: our own, or vLLM's behind the same interface."""

import time
from dataclasses import replace
from importlib import import_module

import msgspec

from worker.core import Clock
from worker.engine_choice import choose_engine
from worker.loaded import LoadedEngine
from worker.log import model_log
from worker.settings import WorkerSettings, variable


def load_engine(settings: WorkerSettings, clock: Clock = time.monotonic) -> LoadedEngine:
    """Load the model in ``settings`` into the engine that they name or that fits them.

    Raises the errors of ``worker.engine.build.build_engine``, ``EngineMissing`` for an engine whose
    packages are not installed, and ``ValueError`` for GPUs or adapters that the engine cannot use.
    """
    choice = choose_engine(settings)
    name, why = choice.name, choice.why
    if why:
        model_log.info("engine %s was chosen: %s", name, why)
    if settings.tensor_parallel > 1 and name != "vllm":
        raise ValueError(
            f"{variable('tensor_parallel')}={settings.tensor_parallel}: the engine {name} does not"
            " split a model over GPUs; set TIDEGATE_WORKER__ENGINE=vllm, or leave it out"
        )
    if settings.adapters and name != "vllm":
        raise ValueError(
            f"{variable('adapters')}: the engine {name} serves no LoRA adapters with a model; set"
            " TIDEGATE_WORKER__ENGINE=vllm, or merge each into a model of its own"
        )
    settings = settings.model_copy(update={"engine": name})
    if name == "vllm":  # imports its packages, which only its environment has
        loaded = import_module("worker.engines.vllm.build").build_engine(settings, clock)
    else:
        loaded = import_module("worker.engine.build").build_engine(settings, clock, measures=True)
    assert isinstance(loaded, LoadedEngine)
    return replace(loaded, card=msgspec.structs.replace(loaded.card, engine_reason=why))
