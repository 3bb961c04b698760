"""How the suite is run: on which worker, in which order, and what a test may take."""

import asyncio
import gc
import importlib
import logging
import re
import resource
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support.lazy import loaded
from tests.support.steady_loop import SteadyLoop

BUDGET_CPU_S = 4.0
"""Of a processor, for one test and the processes that it ended; who takes more without being marked
slow is named."""

STACK = "e2e stack"
ORACLE = "oracle"
SDKS = "SDKs"
_SHARED = r"\b(demo|paced): Stack|\bslots: Triton"
"""Files that have this share Tritons."""
_BESIDE = "|".join(
    (
        r"^\s*(from|import) .*transformers",
        r'(find_spec|importorskip|Lazy)\("transformers',
        r"make_(vision_)?checkpoint\([^()]*(\(.*?\))?,",
        r"^from tests\.support\.engines import",
    )
)
"""Files that have one of these import transformers, which takes four seconds of a processor."""
_MAY_ASK = (
    "tests/clips/",
    "tests/orchestrator/prompts/",
    "tests/perf/",
    "tests/protocol/",
    "tests/worker/",
)
_ASKS = r"^from tests\.support\.lazy import .*(anthropic|openai)"
"""Files that have this import the SDKs of others, which take as long."""
FIRST = (
    STACK,
    ORACLE,
    SDKS,
    "tests/perf/test_sim.py",
    "tests/e2e/test_launch.py",
    "tests/perf/test_sim_conservation.py",
    "tests/worker/test_interpreted.py",
    "tests/worker/engine/test_deterministic.py",
    "tests/perf/test_sim_reported.py",
    "tests/e2e/test_resume.py",
    "tests/e2e/test_wheel.py",
    "tests/e2e/test_pool.py",
    "tests/e2e/test_ports.py",
    "tests/perf/test_service.py",
)
"""The longest units of work: none of them is to begin when the other workers have nothing left."""

# A busy machine may leave any one example without a processor for a second. As each run has fresh
# examples, it need not have many.
hypothesis.settings.register_profile(
    "tidegate",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    max_examples=25,
    stateful_step_count=20,
)
hypothesis.settings.load_profile("tidegate")

_ROOT = Path(__file__).resolve().parents[1]
_KEEP_RECORDS = {"torch", "transformers"}
"""Libraries whose loggers do not propagate."""
LOADED = pytest.StashKey[set[str]]()
"""Large libraries that the collection imported, though only some tests need them."""
_CPU = pytest.StashKey[float]()
_CPU_S = "cpu_s"


@cache
def unit_of(file: str) -> str:
    """What one worker runs as a whole: a file, or all files that share the Tritons ``demo``,
    ``paced`` and ``slots``, or transformers, or the SDKs of others, so that each of them is started
    or imported once."""
    for folders, unit, sign in (
        (("tests/e2e/",), STACK, _SHARED),
        (_MAY_ASK, ORACLE, _BESIDE),
        (("tests/orchestrator/api/",), SDKS, _ASKS),
    ):
        if file.startswith(folders) and re.search(sign, (_ROOT / file).read_text(), re.MULTILINE):
            return unit
    return file


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """No deadline of a test passes because its process was not given a processor.

    Where the other end is a process of its own, time is the machine's for both.
    """
    if item.path.is_relative_to(_ROOT / "tests/e2e"):
        return {"usual": asyncio.new_event_loop}
    return {"steady": SteadyLoop}


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """``--dist loadfile`` by units of work, in the order of collection."""
    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # would begin with those of many tests: the short ones
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = lambda nodeid: unit_of(nodeid.partition("::")[0])
    return scheduler


def pytest_configure() -> None:
    """What a shell runs in the background ignores Ctrl-C, and so would all that tests start. Where
    the interpreter's own handler is in place, asyncio puts another one there with each run of a
    loop, which spells out all that the fixture before it made."""
    signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Without the garbage collector: what is collected stays, and it would walk through all of it
    again and again."""
    gc.disable()
    try:
        _compile_a_share(session.config)
        return (yield)
    finally:
        gc.enable()


def _compile_a_share(config: pytest.Config) -> None:
    """Where nothing is compiled yet, each worker compiles a share of the test modules first.

    With their assertions rewritten that takes ten seconds, and they would all do the same.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode or config.args != ["tests"]:
        return
    modules = sorted(_ROOT.glob("tests/**/test_*.py"))
    for file in modules[int(worker["workerid"][2:]) :: worker["workercount"]]:
        # A module that cannot be imported, or is to be skipped, says so when it is collected.
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(file.relative_to(_ROOT).with_suffix("").parts))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        places = {unit: place for place, unit in enumerate(FIRST)}
        items.sort(key=lambda item: places.get(unit_of(item.nodeid.partition("::")[0]), len(FIRST)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is loaded by now stays: no collection of garbage needs to walk through it, not even
    once."""
    session.config.stash[LOADED] = loaded()
    gc.freeze()
    _propagate_others()


def _propagate_others() -> None:
    """Before each test and after it, pytest visits every logger that keeps its records from the
    root, of which torch has fifty."""
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.partition(".")[0] in _KEEP_RECORDS:
            logger.propagate = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """What a file leaves behind stays, too: libraries above all. A test that collects garbage would
    walk through all of it, which takes half a second by the end."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
        _propagate_others()


def cpu_s() -> float:
    """Of this process, and of those that it started and that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_CPU] = cpu_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "teardown":
        report.user_properties.append((_CPU_S, cpu_s() - item.stash[_CPU]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The budget: what all of it took, and what took too much."""
    took = {
        (report.nodeid, "slow" in report.keywords): value
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == _CPU_S
    }
    terminalreporter.write_line(f"{sum(took.values()):.0f} s of CPU time in {len(took)} tests")
    for (nodeid, is_slow), value in sorted(took.items(), key=lambda each: -each[1]):
        if value > BUDGET_CPU_S and not is_slow:
            terminalreporter.write_line(
                f"  {value:.1f} s of {BUDGET_CPU_S:g} s that a test may take: {nodeid}", yellow=True
            )
