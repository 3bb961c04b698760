"""An operator's placement policy: one expression in CEL, the Common Expression Language (OR-8).

The expression is evaluated for one task and one instance at a time. It is either

- a condition: instances for which it is false do not take the task, or
- a number: the instance with the smallest takes the task, and ``never`` excludes an instance, as in
``instance.kv_free < 100 ? never : instance.predicted_finish_ms``.

CEL reads only its input: no files, no network, no assignment, no loop. Its comprehensions (``all``,
``map`` …) are switched off, so that the time of an evaluation is proportional to the expression's
length. So a time limit that is checked between instances is enough.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Self

from cel_expr_python import cel

from orchestrator.prediction.feasibility import LOOK_SHARE
from orchestrator.telemetry.log import service_log

LIMIT_MS: Final = 50.0
"""Maximum ms for the evaluation of all instances together (OR-8)."""
RESTS_S: Final = LIMIT_MS / 1000 / LOOK_SHARE
"""Seconds of rest for a slow policy, so that it takes no more of the loop than closer looks do."""

Fact = str | int | float | bool
Facts = Mapping[str, Fact]

_STRING, _INT, _DOUBLE = cel.Type.STRING, cel.Type.INT, cel.Type.DOUBLE

TASK_FACTS: Final[Mapping[str, type[Fact]]] = {
    "model": str,
    "tenant": str,
    "priority": str,
    "session": str,
    "prompt_tokens": int,
    "max_tokens": int,
    "left_ms": float,
}
"""Facts about ``task``. Counts are ``int``, times ``double``: CEL compares only equal types."""

INSTANCE_FACTS: Final[Mapping[str, type[Fact]]] = {
    "name": str,
    "device": str,
    "load": int,
    "slots": int,
    "free": int,
    "cached_tokens": int,
    "kv_free": int,
    "has_session": bool,
    "predicted_finish_ms": float,
    "perf_tokens_per_s": float,
}
"""Facts about ``instance``. ``kv_free`` is in blocks, ``cached_tokens`` in the task's prompt."""

_CEL_TYPES = {str: _STRING, int: _INT, float: _DOUBLE, bool: cel.Type.BOOL}
_NEVER = "never"
_CONFIG = "stdlib:\n  disable_macros: true\n"


class BadPolicy(ValueError):
    """The expression is invalid; the message says what is wrong and where."""


class _Failed(Exception):
    """One evaluation gave no usable result."""


class Policy:
    """A checked expression. ``fallbacks`` counts the choices that it could not make, by reason."""

    def __init__(self, expression: cel.Expression, now: Callable[[], float]) -> None:
        self._expression = expression
        self._now = now
        self._suspended_until = -math.inf
        self.fallbacks: Counter[str] = Counter()

    @classmethod
    def compile(cls, text: str, *, now: Callable[[], float] = time.monotonic) -> Self:
        """Check an expression. ``now`` is in seconds. Raises ``BadPolicy``."""
        variables = {_NEVER: _DOUBLE}
        variables |= {f"task.{name}": _CEL_TYPES[kind] for name, kind in TASK_FACTS.items()}
        variables |= {f"instance.{name}": _CEL_TYPES[kind] for name, kind in INSTANCE_FACTS.items()}
        env = cel.NewEnv(config=cel.NewEnvConfigFromYaml(_CONFIG), variables=variables)
        try:
            expression = env.compile(text)
        except RuntimeError as error:
            raise BadPolicy(_explain(str(error))) from None
        if expression.return_type() not in (cel.Type.BOOL, _INT, cel.Type.UINT, _DOUBLE):
            kind = expression.return_type().name()
            raise BadPolicy(f"expected a condition or a number, got {kind}: {text}")
        return cls(expression, now)

    def scores(self, task: Facts, instances: Sequence[Facts]) -> list[float] | None:
        """Each instance's score: the smallest is best, an infinite one excludes the instance. A
        condition gives 0 to the instances that it accepts. None if the built-in policy must decide.
        """
        began = self._now()
        if began < self._suspended_until:
            self.fallbacks["resting"] += 1
            return None
        ends = began + LIMIT_MS / 1000
        scores = []
        try:
            known: dict[str, Fact] = {_NEVER: math.inf}
            known |= {f"task.{name}": value for name, value in task.items()}
            for instance in instances:
                known |= {f"instance.{name}": value for name, value in instance.items()}
                scores.append(self._score(known))
                if self._now() > ends:
                    self._too_slow()
                    return None
        except _Failed as error:
            self._fall_back("error", str(error))
            return None
        return scores

    def _score(self, known: Mapping[str, Fact]) -> float:
        try:
            value = self._expression.eval(data=known).value()
        except RuntimeError as error:
            raise _Failed(_explain(str(error))) from None
        if isinstance(value, bool):
            return 0.0 if value else math.inf
        if not isinstance(value, int | float) or math.isnan(value):
            raise _Failed(_explain(str(value)))
        return float(value)

    def _too_slow(self) -> None:
        self._suspended_until = self._now() + RESTS_S
        self._fall_back("timeout", f"it took over {LIMIT_MS:g} ms; off for {RESTS_S:g} s")

    def _fall_back(self, reason: str, message: str) -> None:
        self.fallbacks[reason] += 1
        level = logging.WARNING if self.fallbacks[reason] == 1 else logging.DEBUG
        service_log.log(level, "placement policy failed, using the built-in one: %s", message)


def _explain(message: str) -> str:
    """CEL's message with line and column, without repeated lines and status codes."""
    message = message.removeprefix("INVALID_ARGUMENT: ").removesuffix("[INVALID_ARGUMENT]")
    message = message.replace("ERROR: <input>:-1:-1: ", "").replace(" (in container '')", "")
    message = message.replace("ERROR: <input>:", "at line:column ")
    return "\n".join(dict.fromkeys(line.rstrip() for line in message.strip().splitlines()))
