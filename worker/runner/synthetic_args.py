"""Arguments of the engines that make up tokens (``TIDEGATE_WORKER__ENGINE_ARGS``), for tests and
benchmarks only."""

from typing import Literal

from pydantic import Field, ValidationError

from worker.environment import Section
from worker.settings import LocalPath, WorkerSettings, variable


class SyntheticArgs(Section):
    """Steps and answers."""

    step_ms: float = Field(default=20.0, gt=0)
    """Time of every ``synthetic-paced`` step, to which ``row_ms`` for each row and
    ``prompt_token_ms`` for each prompt token are added."""
    row_ms: float = Field(default=0.0, ge=0)
    prompt_token_ms: float = Field(default=0.0, ge=0)
    prompt_step_ms: float = Field(default=0.0, ge=0)
    """Time that a step with prompt tokens takes beyond these, however few they are, as on a GPU,
    where decodes alone are one recorded graph."""
    launch_ms: float = Field(default=0.0, ge=0)
    prompt_launch_ms: float = Field(default=0.0, ge=0)
    """Time in which the host launches a step of decodes, or one with prompt tokens; the device
    computes the step before meanwhile, and is done with this one no sooner."""
    slow_file: LocalPath | None = None
    """While this file holds a number, ``synthetic-paced`` steps take that many times as long. It
    may have a worker's device fail as well (``worker.runner.simulated_device``)."""
    lengths: Literal["cap", "prompt"] = "cap"
    """Length of an answer: ``cap`` is ``max_tokens``, ``prompt`` the number that the last two ids
    of its prompt encode (``worker.runner.synthetic``)."""
    script: LocalPath | None = None
    """TOML file with the answers of ``synthetic-scripted`` (docs/clients.md); unset: it calls and
    says what prompts tell it to."""


def synthetic_args(settings: WorkerSettings) -> SyntheticArgs:
    """The arguments that the settings state. Raises ``ValueError`` with what is wrong."""
    try:
        return SyntheticArgs(**settings.engine_args)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ValueError(f"{variable('engine_args')}: {wrong}") from None
