"""OR-8: operators' placement policies: what they may say, what they may not, what failure does."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.placement.policy import INSTANCE_FACTS, RESTS_S, BadPolicy, Fact, Policy
from tests.support.cases import for_each


class Watch:
    """Seconds; every look costs ``per_look_s``."""

    def __init__(self, per_look_s: float = 0.0) -> None:
        self.at = 0.0
        self.per_look_s = per_look_s

    def __call__(self) -> float:
        self.at += self.per_look_s
        return self.at


TASK: dict[str, Fact] = {
    "model": "demo",
    "tenant": "acme",
    "priority": "batch",
    "session": "",
    "prompt_tokens": 100,
    "max_tokens": 50,
    "left_ms": 2000.0,
}


def instance(name: str = "a:1", **changes: Fact) -> dict[str, Fact]:
    facts: dict[str, Fact] = {
        "name": name,
        "device": "cpu",
        "load": 1,
        "slots": 8,
        "free": 7,
        "cached_tokens": 0,
        "kv_free": 100,
        "has_session": False,
        "predicted_finish_ms": 500.0,
        "perf_tokens_per_s": 1000.0,
    }
    assert facts.keys() == INSTANCE_FACTS.keys()
    return facts | changes


THREE = [instance("a:1", load=3), instance("b:1", load=1), instance("c:1", load=2)]


def chosen(text: str, *instances: dict[str, Fact]) -> list[float] | None:
    return Policy.compile(text, now=Watch()).scores(TASK, instances)


def test_or8_a_number_is_the_score() -> None:
    assert chosen("instance.load", *THREE) == [3.0, 1.0, 2.0]
    assert chosen("-instance.perf_tokens_per_s", instance()) == [-1000.0]


def test_or8_a_condition_excludes_those_that_it_is_false_for() -> None:
    assert chosen("instance.load != 1", *THREE) == [0.0, math.inf, 0.0]


def test_or8_never_excludes_an_instance_from_a_ranking() -> None:
    text = 'task.tenant == "acme" && instance.name == "b:1" ? never : instance.predicted_finish_ms'
    assert chosen(text, *THREE) == [500.0, math.inf, 500.0]


@given(loads=st.lists(st.integers(0, 1000), max_size=20), limit=st.integers(0, 1000))
def test_or8_it_does_what_python_would(loads: list[int], limit: int) -> None:
    instances = [instance(str(i), load=load) for i, load in enumerate(loads)]
    got = chosen(f"instance.load > {limit} ? never : double(instance.load) * 2.0", *instances)
    assert got == [2.0 * load if load <= limit else math.inf for load in loads]


@for_each(
    ("text", "where"),
    [
        ("", "1:1"),
        ("instance.load <", "1:16"),
        ("instance.load < 3 &&\n  instance.lod > 1", "2:11"),
        ("instance.load < 4.0", "1:15"),  # a count and a double
        ("task.tenant + 1", "1:13"),
        ("task.tenant", "a condition or a number"),
        ("[1, 2].all(x, x > instance.load)", "all"),  # no loops
        ("[1, 2].map(x, x).size()", "map"),
        ("__import__('os').system('true')", "__import__"),
        ("open('/etc/passwd')", "open"),
        ("+".join(["instance.load"] * 200), "recursion"),
    ],
)
def test_or8_bad_text_fails_at_the_start_with_its_place(text: str, where: str) -> None:
    with pytest.raises(BadPolicy, match=where):
        Policy.compile(text)


@for_each(
    ("text", "facts"),
    [
        ("10 / instance.load", instance(load=0)),
        ("double(instance.load) / 0.0 * 0.0", instance()),  # not a number
    ],
)
def test_or8_an_error_falls_back_and_is_counted(text: str, facts: dict[str, Fact]) -> None:
    policy = Policy.compile(text, now=Watch())
    assert policy.scores(TASK, [facts]) is None
    assert policy.fallbacks == {"error": 1}


def test_or8_only_the_first_error_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A counter has the others."""
    policy = Policy.compile("1 / instance.load", now=Watch())
    for _ in range(3):
        assert policy.scores(TASK, [instance(load=0)]) is None
    assert policy.fallbacks == {"error": 3}
    assert len(caplog.records) == 1
    assert policy.scores(TASK, [instance(load=1)]) == [1.0]


def test_or8_a_slow_policy_falls_back_and_rests() -> None:
    """50 ms for all instances together; then it stalls nobody for a while."""
    watch = Watch(per_look_s=0.02)
    policy = Policy.compile("instance.load", now=watch)
    assert policy.scores(TASK, THREE[:2]) == [3.0, 1.0]
    assert policy.scores(TASK, THREE) is None
    assert policy.scores(TASK, THREE[:1]) is None
    assert policy.fallbacks == {"timeout": 1, "resting": 1}
    watch.at += RESTS_S
    assert policy.scores(TASK, THREE[:1]) == [3.0]


def test_or8_infinity_from_arithmetic_excludes_too() -> None:
    assert chosen("instance.predicted_finish_ms / 0.0", instance()) == [math.inf]
