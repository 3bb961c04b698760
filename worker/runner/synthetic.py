"""Runners that invent tokens, for benchmarks and tests of everything around the model. No torch.

They use the same scheduler and pool as a model, so that leaks show. The text is a fixed cycle of
plain words: token n of any answer is the same in every run.

An answer's length is ``max_tokens`` or, if an end token is given, the length in its prompt: the
last two ids encode it (``length_ids``), unknown to the orchestrator. The end token then comes last,
as with a model; with ``ignore_eos`` there is none.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, ValidationError

from protocol import PromptLogprobs, StepCosts, TokenLogprob
from worker.core import Clock
from worker.environment import Section
from worker.runner.base import BuiltRunner, Runner
from worker.runner.device_probe import DeviceProbe
from worker.runner.simulated_device import SimulatedDevice
from worker.scheduler.plan import DeviceTime, Plan, Row, StepResult
from worker.scheduler.request import Request
from worker.settings import BLOCK_TOKENS, LocalPath, WorkerSettings, variable


class SyntheticArgs(Section):
    """Steps and answers."""

    step_ms: float = Field(default=20.0, gt=0)
    """Base time of every ``synthetic-paced`` step; ``row_ms`` per row and ``prompt_token_ms`` per
    prompt token are added to it."""
    row_ms: float = Field(default=0.0, ge=0)
    prompt_token_ms: float = Field(default=0.0, ge=0)
    prompt_step_ms: float = Field(default=0.0, ge=0)
    """Extra time of a step with any prompt tokens, as on a GPU, where decodes alone are one
    recorded graph."""
    launch_ms: float = Field(default=0.0, ge=0)
    prompt_launch_ms: float = Field(default=0.0, ge=0)
    """Time in which the host launches a step of decodes, or a step with prompt tokens. Meanwhile
    the device computes the previous step; it finishes this step no sooner."""
    slow_file: LocalPath | None = None
    """While this file holds a number, ``synthetic-paced`` steps take that many times as long. The
    file can also make a worker's device fail (``worker.runner.simulated_device``)."""
    lengths: Literal["cap", "prompt"] = "cap"
    """Length of an answer: ``cap`` is ``max_tokens``; ``prompt`` is the number encoded in the last
    two ids of its prompt (``worker.runner.synthetic``)."""
    script: LocalPath | None = None
    """TOML file with the answers of ``synthetic-scripted`` (docs/clients.md); unset: a script that
    makes the calls and gives the answers that prompts request."""


def synthetic_args(settings: WorkerSettings) -> SyntheticArgs:
    """The arguments in the settings. Raises ``ValueError`` that names the problem."""
    try:
        return SyntheticArgs(**settings.engine_args)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ValueError(f"{variable('engine_args')}: {wrong}") from None


_FREE_TOKENS_PER_STEP = 8
"""Tokens per row and step of the free runner: few enough for many small frames, as in real use."""

CYCLE_WORDS = 64
_LENGTH_RADIX = 256
_ROUNDING_S = 1e-9


def length_ids(tokens: int) -> tuple[int, int]:
    """Last two ids of a prompt whose answer ends after ``tokens`` tokens (1 to 65,535)."""
    if not 0 < tokens < _LENGTH_RADIX**2:
        raise ValueError(f"an answer has 1 to {_LENGTH_RADIX**2 - 1} tokens, not {tokens}")
    return divmod(tokens, _LENGTH_RADIX)


def _own_length(request: Request) -> int:
    """Tokens after which an answer ends, from its prompt's last ids; 0 if it never ends."""
    sampling = request.job.sampling
    asked = request.prompt_tokens - request.job.begun_tokens
    if sampling.ignore_eos or asked < 2:
        return 0
    high, low = request.tokens[asked - 2 : asked]
    length = high * _LENGTH_RADIX + low
    return max(length, sampling.min_tokens + request.job.begun_tokens) if length else 0


class FreeRunner:
    """A ``Runner`` without delays: several tokens per row and step."""

    def __init__(
        self,
        cycle: Sequence[int],
        tokens_per_step: int = _FREE_TOKENS_PER_STEP,
        end_id: int | None = None,
    ) -> None:
        if not cycle:
            raise ValueError("a synthetic engine needs at least one token to repeat")
        self._period = len(cycle)
        self._ids = list(cycle) * (-(-tokens_per_step // self._period) + 1)
        self._tokens_per_step = tokens_per_step
        self._end_id = end_id

    def execute(self, plan: Plan) -> StepResult:
        ids: list[list[int]] = []
        wants_logprobs = False
        prompts: dict[int, list[PromptLogprobs]] = {}
        most = self._tokens_per_step
        for index, row in enumerate(plan.rows):
            if row.request.job.sampling.prompt_logprobs is not None and (read := read_prompt(row)):
                prompts[index] = [read]
            if not row.samples:
                ids.append([])
                continue
            request = row.request
            total = len(request.tokens)
            made = total - request.prompt_tokens + request.job.begun_tokens
            first = made % self._period
            row_ids = self._ids[first : first + min(most, request.limit_tokens - total)]
            if self._end_id is not None and (length := _own_length(request)):
                del row_ids[max(1, length - made) :]
                if made + len(row_ids) >= length:
                    row_ids[-1] = self._end_id
            ids.append(row_ids)
            wants_logprobs = wants_logprobs or request.job.sampling.logprobs is not None
        if not wants_logprobs:
            return StepResult(ids, prompts=prompts)
        logprobs: list[list[TokenLogprob] | None] = []
        for row, row_ids in zip(plan.rows, ids, strict=True):
            top = row.request.job.sampling.logprobs
            logprobs.append(None if top is None else [certain(i, top) for i in row_ids])
        return StepResult(ids, logprobs, prompts)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: ``step_s`` + ``row_s`` · rows + ``prompt_token_s`` · prompt tokens, plus
    ``prompt_step_s`` if it has prompt tokens. The host takes ``launch_s`` to launch it, or
    ``prompt_launch_s`` if it has prompt tokens. The device finishes no sooner than the launch.

    A real engine's steps have this form: weights are read once per step, each row adds its
    attention and sampling, and each prompt token adds its arithmetic. On a GPU, decodes alone are a
    recorded graph; a step with a prompt is launched kernel by kernel, which is slow even for a
    short prompt.
    """

    step_s: float
    row_s: float = 0.0
    prompt_token_s: float = 0.0
    prompt_step_s: float = 0.0
    launch_s: float = 0.0
    prompt_launch_s: float = 0.0

    def steps_of(self, slots: int) -> StepCosts:
        """The costs in the form that a card has."""
        rows = tuple(sorted({1, slots}))
        times = tuple(1000 * (self.step_s + self.row_s * count) for count in rows)
        return StepCosts(rows, times, 1000 * self.prompt_token_s)

    def launch_of(self, plan: Plan) -> float:
        """Seconds that the host takes to launch ``plan``."""
        return self.prompt_launch_s if plan.tokens > plan.decodes else self.launch_s

    def of(self, plan: Plan) -> float:
        """Seconds that the device takes for ``plan``."""
        return self.of_size(len(plan.rows), plan.tokens - plan.decodes)

    def of_size(self, rows: int, prompt_tokens: int) -> float:
        """Seconds that the device takes for a step of ``rows`` with ``prompt_tokens`` in all."""
        tokens_s = self.prompt_token_s * prompt_tokens
        prompts_s = self.prompt_step_s + tokens_s if prompt_tokens else 0.0
        return self.step_s + self.row_s * rows + prompts_s


class PacedDevice:
    """Computes launched steps one after another on ``clock``, as a GPU's stream does."""

    def __init__(self, clock: Clock, wait: Callable[[float], None]) -> None:
        """``wait`` waits for that many seconds or fewer."""
        self._clock = clock
        self._wait = wait
        self._free_at = clock()

    def launch(self, result: StepResult, *, launch_s: float, busy_s: float) -> "PacedStep":
        """Spend ``launch_s``, and queue a step of ``busy_s`` after the steps before it."""
        now = self._clock()
        begun_at = max(now, self._free_at)
        done_at = max(begun_at + busy_s, now + launch_s)
        result.device = DeviceTime(done_at - begun_at, begun_at - self._free_at, 0.0)
        self._free_at = done_at
        self.wait_until(now + launch_s)
        return PacedStep(self, result, done_at)

    def wait_until(self, time: float) -> None:
        while (left_s := time - self._clock()) > _ROUNDING_S:
            self._wait(left_s)


class PacedStep:
    """A ``LaunchedStep`` of a ``PacedDevice``."""

    def __init__(self, device: PacedDevice, result: StepResult, done_at: float) -> None:
        self._device = device
        self._result = result
        self._done_at = done_at

    def collect(self) -> StepResult:
        self._device.wait_until(self._done_at)
        return self._result


class PacedRunner:
    """An ``OverlappingRunner`` with one token per row and step; a step lasts as long as its cost.

    ``device`` can be slow or fail on request.
    """

    def __init__(
        self,
        cycle: Sequence[int],
        cost: StepCost,
        *,
        end_id: int | None = None,
        device: SimulatedDevice | None = None,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._free = FreeRunner(cycle, tokens_per_step=1, end_id=end_id)
        self._cost = cost
        self._device = device or SimulatedDevice()
        self._probe = DeviceProbe(self._device.answer)
        self._queue = PacedDevice(clock, sleep)

    def execute(self, plan: Plan) -> StepResult:
        return self.launch(plan).collect()

    def launch(self, plan: Plan) -> PacedStep:
        result = self._free.execute(plan)
        try:
            factor = self._device.launch()
        except Exception:
            self._probe.check()
            raise
        cost = self._cost
        return self._queue.launch(
            result, launch_s=cost.launch_of(plan), busy_s=factor * cost.of(plan)
        )

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


def build_synthetic_runner(
    settings: WorkerSettings,
    context_tokens: int,
    words: Sequence[int],
    eos: Sequence[int],
    clock: Clock,
) -> BuiltRunner:
    """Build a runner that repeats ``words`` (token ids). Raises ``ValueError``."""
    if not words:
        raise ValueError(
            f"{settings.model_path}: the tokenizer has no plain words for a synthetic engine"
        )
    end_id = None
    args = synthetic_args(settings)
    if args.lengths == "prompt":
        if not eos:
            raise ValueError(
                f"{settings.model_path}: no end token for "
                "lengths=prompt; name one in its config.json or say cap"
            )
        end_id = eos[0]
    runner: Runner
    costs: StepCosts | None = None
    if settings.engine == "synthetic-free":
        runner = FreeRunner(words, end_id=end_id)
    else:
        cost = StepCost(
            args.step_ms / 1e3,
            args.row_ms / 1e3,
            args.prompt_token_ms / 1e3,
            args.prompt_step_ms / 1e3,
            args.launch_ms / 1e3,
            args.prompt_launch_ms / 1e3,
        )
        device = SimulatedDevice(args.slow_file, clock)
        runner = PacedRunner(words, cost, end_id=end_id, device=device, clock=clock)
        costs = cost.steps_of(settings.max_running)
    blocks_per_job = -(-context_tokens // BLOCK_TOKENS)
    blocks = settings.kv.blocks or settings.max_running * blocks_per_job
    return BuiltRunner(runner, blocks, "none", "none", step_costs=costs)


def read_prompt(row: Row) -> PromptLogprobs | None:
    """Log-probabilities (all 0) of the prompt tokens after the row's; None if there are none."""
    request, top = row.request, row.request.job.sampling.prompt_logprobs or 0
    ids = request.tokens[row.start + 1 : min(row.start + row.count + 1, request.prompt_tokens)]
    if not ids:
        return None
    return PromptLogprobs.pack(row.start + 1, [certain(token, top) for token in ids])


def certain(token: int, top: int) -> TokenLogprob:
    """Log-probability 0, for a token that was the only possibility."""
    return TokenLogprob(0.0, [(token, 0.0)] if top else [], rank=1)
