"""Limits requests to the budgets of their key and their run (DL-25).

A request reserves the most that it can use: its prompt, and all that it may generate. The unused
part is released at its end. A request without a limit on its answer gets the rest of the budget.

Orchestrators that share a store add up their spending (``Sums``). Each knows the cost of the
others' requests within a second or two after they end.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from orchestrator.admission.rate_limits import Standing
from orchestrator.budgets.books import Amount, BookEntry, Books, month_ends, month_of
from orchestrator.budgets.section import BudgetSection, KeyBudget, Price
from orchestrator.clock import Clock
from orchestrator.errors import InvalidRequest, NotReady, RateLimited
from orchestrator.tasks.runs import MAX_RUNS, RunName, run_names
from orchestrator.tasks.task import Task

_FREE = Price()
_RUN = "this run"
MAX_SHARED = 256
"""Most sums per exchange."""


@dataclass(slots=True)
class _Spending:
    """Spending under one name: by this process since its start, and the others' last report."""

    tokens: int = 0
    cost: float = 0.0
    others: tuple[int, float] = (0, 0.0)

    def add(self, used: Amount) -> None:
        self.tokens += used.tokens
        self.cost += used.cost


@dataclass(slots=True)
class _Account:
    whose: str = ""
    budget: KeyBudget = field(default_factory=KeyBudget)
    tokens: int = 0
    cost: float = 0.0
    name: str = ""
    spending: _Spending = field(default_factory=_Spending)

    def tokens_left(self) -> int:
        return max(0, self.budget.tokens - self.tokens - self.spending.others[0])

    def cost_left(self) -> float:
        return max(0.0, self.budget.cost - self.cost - self.spending.others[1])


class Budgets:
    """Budgets of all keys and runs, and the books."""

    def __init__(
        self, section: BudgetSection, names: Mapping[str, str], books: Books, clock: Clock
    ) -> None:
        """``names``: key names by fingerprint."""
        self.books = books
        self._section = section
        self._names = names
        self._clock = clock
        self._reserved = defaultdict[str, _Account](_Account)
        """The most that each key's live requests can still use."""
        self._runs: OrderedDict[RunName, _Account] = OrderedDict()
        """Runs with a budget, least recently used first."""
        self._month, self._of_keys = "", defaultdict[str, _Spending](_Spending)
        self._shared: OrderedDict[str, _Spending] = OrderedDict()
        """Spending that is reported to other processes: of months and of runs with a budget, by
        name, least recently used first."""

    def budget_of(self, key: str) -> KeyBudget:
        return self._section.keys.get(self._names.get(key, ""), self._section.each_key)

    def account_of(self, key: str) -> _Account:
        spent = self.books.spent(month_of(self._clock.unix()), key)
        held = self._reserved[key]
        whose, budget = "this key in this month", self.budget_of(key)
        # The books and the others' sums both include this machine's other processes: do not add.
        all_spent = self._of_month(key)
        tokens = max(spent.tokens, all_spent.tokens + all_spent.others[0])
        cost = max(spent.cost, all_spent.cost + all_spent.others[1])
        return _Account(whose, budget, tokens + held.tokens, cost + held.cost)

    def standings(self, key: str) -> Iterator[Standing]:
        account, now = self.account_of(key), self._clock.unix()
        reset_s = month_ends(now) - now
        if account.budget.tokens:
            left = account.tokens_left()
            yield Standing("tokens-month", account.budget.tokens, left, reset_s)
        if account.budget.cost:
            left_cost = round(account.cost_left(), 6)
            yield Standing("cost-month", account.budget.cost, left_cost, reset_s)

    def charge(self, task: Task) -> None:
        """Reserve the most that a task can use. Its prompt must have been read. Raises
        ``RateLimited`` or ``NotReady``."""
        if not self.books.is_open and self.budget_of(task.job.key) != KeyBudget():
            raise NotReady("the spending of this key is not read yet; try again shortly")
        accounts = [self.account_of(task.job.key), *self._run_of(task)]
        price = self._section.prices.get(task.model, _FREE)
        for account in accounts:
            self._fit(task, account, price)
        for account in accounts:
            self._require(task, account, price)
        most = _most(task, price)
        for account in (self._reserved[task.job.key], *accounts[1:]):
            account.tokens += most.tokens
            account.cost += most.cost
        task.on_end.append(lambda ended: self._release(ended, most, price, accounts[1:]))

    def _run_of(self, task: Task) -> list[_Account]:
        """The account of the task's run, if it has a budget."""
        job, names = task.job, run_names(task.job)
        run = next((self._runs[name] for name in names if name in self._runs), None)
        if job.max_run_tokens or job.max_run_cost:
            if not names:
                raise InvalidRequest(
                    "max_run_tokens and max_run_cost need a run: send the same session_id or "
                    "traceparent header with all calls of the run",
                    field="max_run_tokens" if job.max_run_tokens else "max_run_cost",
                )
            run = run or _Account(_RUN, name="run " + " ".join(names[0]))
            run.budget = KeyBudget(
                tokens=job.max_run_tokens or run.budget.tokens,
                cost=job.max_run_cost or run.budget.cost,
            )
        if run is None:
            return []
        self._share(run.name, run.spending)
        for name in names:
            self._runs[name] = run
            self._runs.move_to_end(name)
        while len(self._runs) > MAX_RUNS:
            self._runs.popitem(last=False)
        return [run]

    @staticmethod
    def _fit(task: Task, account: _Account, price: Price) -> None:
        """Limit an answer without its own limit to the rest of the budget."""
        if task.job.max_tokens is not None:
            return
        most = task.sampling.max_tokens
        if account.budget.tokens:
            most = min(most, account.tokens_left() - task.prompt_tokens)
        if account.budget.cost and price.completion:
            left = account.cost_left() - task.prompt_tokens * price.prompt / 1e6
            most = min(most, int(1e6 * left / price.completion))
        least = max(1, task.sampling.min_tokens)
        if least <= most < task.sampling.max_tokens:
            task.sampling = msgspec.structs.replace(task.sampling, max_tokens=most)

    def _require(self, task: Task, account: _Account, price: Price) -> None:
        budget, most = account.budget, _most(task, price)
        tokens_left, cost_left = account.tokens_left(), account.cost_left()
        if budget.tokens and most.tokens > tokens_left:
            needs, left = f"{most.tokens} tokens", f"{tokens_left} of {budget.tokens}"
        elif budget.cost and most.cost > cost_left:
            needs, left = f"a cost of {most.cost:.6g}", f"{cost_left:.6g} of {budget.cost:g}"
        else:
            return
        error = RateLimited(
            f"prompt and max_tokens can use {needs}, but only {left} are left for {account.whose}: "
            "send a smaller max_tokens",
            retryable=False,
            field="max_tokens",
        )
        if budget.tokens:
            error.details["tokens_left"] = tokens_left
        if budget.cost:
            error.details["cost_left"] = round(cost_left, 6)
        if account.whose != _RUN:
            error.details["resets_unix_ms"] = round(1000 * month_ends(self._clock.unix()))
        raise error

    def _release(self, task: Task, most: Amount, price: Price, runs: list[_Account]) -> None:
        used = _used(task, price)
        held = self._reserved[task.job.key]
        held.tokens -= most.tokens
        held.cost -= most.cost
        for run in runs:
            run.tokens += used.tokens - most.tokens
            run.cost += used.cost - most.cost
            run.spending.add(used)

    def follow(self, task: Task) -> None:
        task.on_end.append(self._enter)

    def _enter(self, task: Task) -> None:
        assert task.ending is not None
        job = task.job
        # Many clients give each request its own trace: such a trace is not a run.
        of_trace = job.trace is not None and (
            job.calls_left is not None or any(name in self._runs for name in run_names(job))
        )
        run = job.session_id or (job.trace.trace_id if job.trace and of_trace else "")
        model = task.model or task.job.model
        month, outcome = month_of(self._clock.unix()), task.ending.outcome.value
        entry = BookEntry(month, job.key, run, model, outcome)
        used = _used(task, self._section.prices.get(model, _FREE))
        self.books.enter(entry, used)
        self._of_month(job.key).add(used)

    def own(self) -> Mapping[str, tuple[int, float]]:
        """See ``Sums``."""
        return {name: (one.tokens, one.cost) for name, one in self._shared.items()}

    def hear(self, name: str, others: tuple[int, float]) -> None:
        """See ``Sums``."""
        if name in self._shared:
            self._shared[name].others = others

    def _share(self, name: str, spending: _Spending) -> None:
        self._shared[name] = spending
        self._shared.move_to_end(name)
        if len(self._shared) > MAX_SHARED:
            self._shared.popitem(last=False)

    def _of_month(self, key: str) -> _Spending:
        month = month_of(self._clock.unix())
        if month != self._month:  # an earlier month is never needed
            self._month, self._of_keys = month, defaultdict(_Spending)
        spending = self._of_keys[key]
        self._share(f"{month} {key}", spending)
        return spending


def _most(task: Task, price: Price) -> Amount:
    return _amount(task.prompt_tokens, 0, task.sampling.max_tokens, price)


def _used(task: Task, price: Price) -> Amount:
    prompt_tokens = task.prompt_tokens if task.marks.dispatched else 0
    cached = min(prompt_tokens, task.cached_tokens)
    return _amount(prompt_tokens, cached, task.completion_tokens, price)


def _amount(prompt: int, cached: int, completion: int, price: Price) -> Amount:
    cached_price = price.prompt if price.cached is None else price.cached
    cost = (prompt - cached) * price.prompt + cached * cached_price + completion * price.completion
    return Amount(1, prompt, cached, completion, cost / 1e6)
