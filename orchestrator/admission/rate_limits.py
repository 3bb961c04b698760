"""Rate limits, per key and for the whole service (OR-12).

Rates use the generic cell rate algorithm (ITU-T I.371). It keeps one number per limit: the time at
which the steady rate has refilled all units taken so far. A burst may take a full minute's units at
once. No interval of ``w`` seconds admits more than ``limit · (1 + w / 60)``.

A request takes one unit of the request rate on arrival. When its prompt and maximum length are
known it takes that many units of the token rate. At its end it returns unused tokens.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic import Field

from orchestrator.clock import Clock
from orchestrator.errors import RateLimited
from orchestrator.tasks.task import Task
from orchestrator.tasks.work import AnyWork
from worker.environment import Section

WINDOW_S = 60.0
"""The interval of all rates: a minute."""


class Limits(Section):
    """Limits of a key, or of all keys together; 0 means no limit. Tokens are those of prompts and
    answers together."""

    requests_per_min: int = Field(default=0, ge=0)
    """Maximum requests per minute."""
    tokens_per_min: int = Field(default=0, ge=0)
    """Maximum tokens of prompts and answers per minute."""
    concurrent: int = Field(default=0, ge=0)
    """Maximum requests in progress at a time."""


@dataclass(frozen=True, slots=True)
class RateLimitConfig:
    """Settings of rate limits."""

    everyone: Limits = field(default_factory=Limits)
    """Limits of all keys together."""
    default: Limits = field(default_factory=Limits)
    """Limits of each key without its own, and of requests without a key."""
    by_key: Mapping[str, Limits] = field(default_factory=dict)
    """Limits of individual keys, by the key's fingerprint."""


class Rate:
    """A sustained rate of at most ``per_min`` units per minute, plus a burst of as many."""

    __slots__ = ("_paid_until", "_unit_s", "per_min")

    def __init__(self, per_min: int) -> None:
        self.per_min = per_min
        self._unit_s = WINDOW_S / per_min
        self._paid_until = -math.inf

    def wait_s(self, count: int, now: float) -> float:
        """Seconds until ``count`` units can be taken; 0 if now, inf if never."""
        if count > self.per_min:
            return math.inf
        paid_s = self.reset_s(now) + count * self._unit_s
        # Rounding must refuse no request.
        return 0.0 if math.isclose(paid_s, WINDOW_S) else max(0.0, paid_s - WINDOW_S)

    def take(self, count: int, now: float) -> None:
        """Take ``count`` units that ``wait_s`` allowed."""
        self._paid_until = max(self._paid_until, now) + count * self._unit_s

    def give_back(self, count: int) -> None:
        """Return ``count`` of the units taken; the rate never holds more than a full burst."""
        self._paid_until -= count * self._unit_s

    def level(self, whole_s: float, now: float) -> None:
        """Set the seconds until the burst is full again, as other orchestrators report it."""
        self._paid_until = now + whole_s

    def remaining(self, now: float) -> int:
        whole = math.floor((WINDOW_S - self.reset_s(now)) / self._unit_s)
        return whole + (self.wait_s(whole + 1, now) == 0)

    def reset_s(self, now: float) -> float:
        return max(0.0, self._paid_until - now)


class Account:
    """Usage of one key, or of all keys together."""

    def __init__(self, limits: Limits) -> None:
        self.rates: dict[str, Rate] = {}
        """The rates of ``requests`` and ``tokens`` that have limits."""
        self.running = 0
        self.limit(limits)

    def limit(self, limits: Limits) -> None:
        """Apply new limits. Running requests stay counted; an unchanged rate keeps its state."""
        self.concurrent = limits.concurrent
        per_min = {"requests": limits.requests_per_min, "tokens": limits.tokens_per_min}
        same = {unit: rate for unit, rate in self.rates.items() if rate.per_min == per_min[unit]}
        self.rates = {unit: Rate(most) for unit, most in per_min.items() if most} | same


class Standing(NamedTuple):
    """One limit of a key: its size, the units that remain now, and the seconds until it is full
    again."""

    unit: str
    limit: float
    remaining: float
    reset_s: float


EVERYONE = "*"
"""Name of the account of all keys together."""


class SharedAccount(NamedTuple):
    """An account with limits, for a store that several orchestrators share."""

    name: str
    whose: str
    limits: tuple[int, int, int]
    """Requests per minute, tokens per minute, requests in progress; 0 means no limit."""
    running: int
    """Requests in progress at this orchestrator."""


class Limiter:
    """Enforces the limits of each key and those of all keys together."""

    def __init__(self, config: RateLimitConfig, clock: Clock) -> None:
        self._clock = clock
        self._config = config
        self._everyone = Account(config.everyone)
        self._accounts = {key: Account(limits) for key, limits in config.by_key.items()}

    def replace(self, config: RateLimitConfig) -> None:
        """Replace all limits, also for running requests; a changed rate starts again."""
        self._config = config
        self._everyone.limit(config.everyone)
        for key, account in self._accounts.items():
            account.limit(self._limits_of(key))

    def _limits_of(self, key: str) -> Limits:
        return self._config.by_key.get(key, self._config.default)

    def require(self, key: str, count: int, max_tokens: int, field: str) -> None:
        """Check that ``count`` requests of ``max_tokens`` each, which are only useful together, can
        start now. Raises ``RateLimited``, not retryable if they never can.

        Takes no units: a client that took some at each try would never get all.
        """
        accounts, now = self._accounts_of(key), self._clock.now()
        for account, whose in accounts:
            never = ""
            if account.concurrent and count > account.concurrent:
                never = f"{account.concurrent} requests in progress for {whose}"
            # A prompt has at least one token.
            for unit, most in (("requests", count), ("tokens", count * (max_tokens + 1))):
                rate = account.rates.get(unit)
                if rate is not None and most > rate.per_min and not never:
                    never = f"{rate.per_min} {unit} a minute for {whose}"
            if never:
                raise RateLimited(
                    f"{count} choices are above the limit of {never}: ask for fewer",
                    retryable=False,
                    field=field,
                )
        _require(accounts, count, now)

    def concurrent_of(self, key: str) -> int:
        """Maximum number of a key's requests in progress; 0 means no limit."""
        limits = [account.concurrent for account, _ in self._accounts_of(key)]
        return min((limit for limit in limits if limit), default=0)

    def begin(self, work: AnyWork) -> None:
        """Count a request until its end. Raises ``RateLimited``."""
        self._enter(work.job.key)
        work.on_end.append(lambda ended: self._leave(ended.job.key))

    @contextmanager
    def counted(self, key: str, requests: int = 1) -> Iterator[None]:
        """Count other work than tasks as in progress while the block runs, and as ``requests``: 0
        if a request follows that ``begin`` counts. Raises ``RateLimited``."""
        self._enter(key, requests)
        try:
            yield
        finally:
            self._leave(key)

    def _enter(self, key: str, requests: int = 1) -> None:
        accounts, now = self._accounts_of(key), self._clock.now()
        _require(accounts, 1, now)
        for account, _ in accounts:
            account.running += 1
            if (rate := account.rates.get("requests")) is not None:
                rate.take(requests, now)

    def _leave(self, key: str) -> None:
        for account, _ in self._accounts_of(key):
            account.running -= 1

    def charge(self, task: Task) -> None:
        """Take the most tokens that a task can use. Raises ``RateLimited``."""
        rates, now = self._rates_of(task.job.key, "tokens"), self._clock.now()
        most = task.prompt_tokens + task.sampling.max_tokens
        for rate, whose in rates:
            if (wait_s := rate.wait_s(most, now)) <= 0:
                continue
            limit = f"the limit of {rate.per_min} tokens a minute for {whose}"
            if math.isinf(wait_s):
                raise RateLimited(
                    f"prompt and max_tokens add up to {most} tokens, which is above {limit}: "
                    "ask for less",
                    retryable=False,
                    field="max_tokens",
                )
            raise RateLimited(f"{limit} is reached", retry_after_ms=1000 * wait_s)
        for rate, _ in rates:
            rate.take(most, now)
        task.on_end.append(lambda ended: self._settle_tokens(ended, most))

    def standings(self, key: str) -> list[Standing]:
        """A key's standing in requests and in tokens, each for the tighter limit."""
        now, found = self._clock.now(), []
        for unit in ("requests", "tokens"):
            if rates := [rate for rate, _ in self._rates_of(key, unit)]:
                rate = min(rates, key=lambda rate: rate.remaining(now))
                found.append(Standing(unit, rate.per_min, rate.remaining(now), rate.reset_s(now)))
        return found

    def shared_accounts(self, key: str) -> list[SharedAccount]:
        """The accounts of a key's requests that have limits."""
        found = []
        for (account, whose), name in zip(self._accounts_of(key), (key, EVERYONE), strict=True):
            per_min = {unit: rate.per_min for unit, rate in account.rates.items()}
            limits = per_min.get("requests", 0), per_min.get("tokens", 0), account.concurrent
            if any(limits):
                found.append(SharedAccount(name, whose, limits, account.running))
        return found

    def level(self, key: str, name: str, kind: str, whole_s: float) -> None:
        """Set a rate (``requests`` or ``tokens``) of an account to the usage of all orchestrators
        together: it is full again in ``whole_s`` seconds."""
        (own, _), (everyone, _) = self._accounts_of(key)
        account = everyone if name == EVERYONE else own
        if (rate := account.rates.get(kind)) is not None:
            rate.level(whole_s, self._clock.now())

    def _accounts_of(self, key: str) -> tuple[tuple[Account, str], tuple[Account, str]]:
        account = self._accounts.get(key)
        if account is None:  # only valid keys get here, so they are few
            account = self._accounts[key] = Account(self._limits_of(key))
        return (account, "this key"), (self._everyone, "the whole service")

    def _rates_of(self, key: str, unit: str) -> list[tuple[Rate, str]]:
        """The rates of ``unit`` for a key's requests, each with its owner's name."""
        accounts = self._accounts_of(key)
        return [
            (account.rates[unit], whose) for account, whose in accounts if unit in account.rates
        ]

    def _settle_tokens(self, task: Task, taken: int) -> None:
        used = task.prompt_tokens + task.completion_tokens if task.marks.dispatched else 0
        for rate, _ in self._rates_of(task.job.key, "tokens"):
            rate.give_back(max(0, taken - used))


def _require(accounts: Iterable[tuple[Account, str]], count: int, now: float) -> None:
    """Raise ``RateLimited`` unless ``count`` requests can start now on all of ``accounts``."""
    for account, whose in accounts:
        if account.concurrent and account.running + count > account.concurrent:
            raise RateLimited(
                f"{account.running} requests of {whose} are in progress and the limit is"
                f" {account.concurrent}"  # unknown end: the default wait
            )
        rate = account.rates.get("requests")
        if rate is not None and (wait_s := rate.wait_s(count, now)) > 0:
            raise RateLimited(
                f"the limit of {rate.per_min} requests a minute for {whose} is reached",
                retry_after_ms=1000 * wait_s,
            )
