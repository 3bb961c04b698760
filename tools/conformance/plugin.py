"""Pytest plugin: each rule is a test of its own.

    pytest -p deadline_conformance.plugin --conformance-url URL --conformance-model NAME

A broken rule fails; one that could not be measured is an error, since nothing was shown; one that
does not apply is skipped. The measurements run once, before the first of these tests.
"""

import asyncio
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

import pytest

from .command import OPTIONS, effort_of, target_of
from .rules import Finding, Rule, UnknownRule, Verdict, chosen
from .run import Report, examine
from .server import Effort, Unusable
from .target import BadTarget, Target


class _NotShown(Exception):
    """A rule was broken, or could not be measured."""


class _Once:
    """The run that all of the rules' tests share; the first of them measures."""

    def __init__(self, target: Target, effort: Effort, only: Sequence[str]) -> None:
        self._asked = target, effort, only

    @cached_property
    def found(self) -> Report | Unusable:
        try:
            return asyncio.run(examine(*self._asked))
        except Unusable as error:
            return error


_ONCE: Final = pytest.StashKey[_Once]()


class RuleItem(pytest.Item):
    """The test of one rule."""

    def __init__(self, *, rule: Rule, **given: Any) -> None:
        super().__init__(**given)
        self._rule = rule

    def _finding(self) -> Finding:
        found = self.config.stash[_ONCE].found
        if isinstance(found, Unusable):
            raise found
        return next(each for each in found.findings if each.rule == self._rule.id)

    def setup(self) -> None:
        finding = self._finding()
        if finding.verdict is Verdict.NOT_APPLICABLE:
            pytest.skip(finding.said)
        if finding.verdict is Verdict.UNMEASURED:
            raise _NotShown(f"could not be measured: {finding.said}")

    def runtest(self) -> None:
        if (finding := self._finding()).verdict is Verdict.FAIL:
            raise _NotShown(finding.said)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if not isinstance(excinfo.value, _NotShown | Unusable):
            return super().repr_failure(excinfo, style)
        rule = self._rule
        what = f"measured: {rule.measured}\ntolerance: {rule.tolerance}"
        return f"{rule.id}: {rule.sentence}\n{excinfo.value}\n{what}"

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, f"deadline conformance: {self._rule.id}"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("deadline-conformance", "what a deadline means at a server")
    for name, options in OPTIONS.items():
        group.addoption(f"--conformance-{name}", dest=f"conformance_{name}", **options)


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    given = {name: config.getoption(f"conformance_{name}") for name in OPTIONS}
    if not given["url"]:
        return
    if hasattr(config, "workerinput"):
        raise pytest.UsageError("the rules of --conformance-url share one run: pass -n 0")
    try:
        rules, target, effort = chosen(given["only"]), target_of(given), effort_of(given)
    except (BadTarget, UnknownRule) as error:
        raise pytest.UsageError(f"--conformance-…: {error}") from error
    config.stash[_ONCE] = _Once(target, effort, given["only"])
    items += [
        RuleItem.from_parent(
            session, name=rule.id, nodeid=f"deadline-conformance::{rule.id}", rule=rule
        )
        for rule in rules
    ]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    once = config.stash.get(_ONCE, None)
    found = vars(once).get("found") if once is not None else None
    if isinstance(found, Report):
        terminalreporter.section("deadline conformance")
        terminalreporter.write_line(found.text())
