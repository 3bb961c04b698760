"""Pytest plugin: each rule is a test of its own.

    pytest -p deadline_conformance.plugin --conformance-url URL --conformance-model NAME

A broken rule fails; one that could not be measured is an error, since nothing was shown; one that
does not apply is skipped. The measurements run once, before the first of these tests.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import pytest

from .budget import Effort, Unusable
from .command import OPTIONS, effort_of, target_of
from .report import Report
from .rules import Finding, Rule, UnknownRule, Verdict, chosen
from .run import examine
from .target import BadTarget, Target

_PREFIX: Final = "conformance"
_RUN: Final = pytest.StashKey["_Once"]()


class _NotShown(Exception):
    """A rule was broken, or could not be measured."""


class _Once:
    """The run that all of the rules' tests share."""

    def __init__(self, target: Target, effort: Effort, only: Sequence[str]) -> None:
        self._asked = target, effort, only
        self._failed: Unusable | None = None
        self.report: Report | None = None

    def finding(self, rule: Rule) -> Finding:
        """Finding about ``rule``; the first call measures. Raises ``Unusable``."""
        if self._failed is not None:
            raise self._failed
        if self.report is None:
            try:
                self.report = asyncio.run(examine(*self._asked))
            except Unusable as error:
                self._failed = error
                raise
        return next(each for each in self.report.findings if each.rule == rule.id)


class RuleItem(pytest.Item):
    """The test of one rule."""

    def __init__(self, *, rule: Rule, once: _Once, **given: Any) -> None:
        super().__init__(**given)
        self._rule, self._once = rule, once

    def setup(self) -> None:
        finding = self._once.finding(self._rule)
        if finding.verdict is Verdict.NOT_APPLICABLE:
            pytest.skip(finding.said)
        if finding.verdict is Verdict.UNMEASURED:
            raise _NotShown(f"could not be measured: {finding.said}")

    def runtest(self) -> None:
        finding = self._once.finding(self._rule)
        if finding.verdict is Verdict.FAIL:
            raise _NotShown(finding.said)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if not isinstance(excinfo.value, _NotShown | Unusable):
            return super().repr_failure(excinfo, style)
        rule = self._rule
        return (
            f"{rule.id}: {rule.sentence}\n{excinfo.value}\n"
            f"measured: {rule.measured}\ntolerance: {rule.tolerance}: {rule.why}"
        )

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, f"deadline conformance: {self._rule.id}"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("deadline-conformance", "what a deadline means at a server")
    for name, options in OPTIONS.items():
        group.addoption(f"--{_PREFIX}-{name}", dest=f"{_PREFIX}_{name}", **options)


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    given = {name: config.getoption(f"{_PREFIX}_{name}") for name in OPTIONS}
    if not given["url"]:
        return
    if hasattr(config, "workerinput"):
        raise pytest.UsageError("the rules of --conformance-url share one run: pass -n 0")
    try:
        rules = chosen(given["only"])
        once = _Once(target_of(given), effort_of(given), given["only"])
    except (BadTarget, UnknownRule) as error:
        raise pytest.UsageError(f"--{_PREFIX}-…: {error}") from error
    config.stash[_RUN] = once
    items += [
        RuleItem.from_parent(
            session, name=rule.id, nodeid=f"deadline-conformance::{rule.id}", rule=rule, once=once
        )
        for rule in rules
    ]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    once = config.stash.get(_RUN, None)
    if once is not None and once.report is not None:
        terminalreporter.section("deadline conformance")
        terminalreporter.write_line(once.report.text())
