"""``--engine``: an engine in a process of its own, and one that is not there."""

from importlib.util import find_spec
from typing import get_args

import pytest

from perf.engine import engines
from perf.engine.contestants import CONTESTANTS, Contestant
from worker.settings import EngineName


def test_every_contestant_is_an_engine() -> None:
    named = set(get_args(EngineName)) - {"auto"}
    real = {name for name in named if not name.startswith("synthetic")}
    assert set(CONTESTANTS) == real


@pytest.mark.slow
def test_engines_are_measured_and_what_is_missing_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing_name = "vllm"
    monkeypatch.setattr("perf.engine.contestants.environment_if_made", lambda *_: {})
    if find_spec(missing_name) is not None:
        pytest.skip("vLLM is among the packages of this Python")
    name = "synthetic-paced"  # a real one would load torch for this
    monkeypatch.setitem(engines.CONTESTANTS, name, Contestant(name))
    results, card = engines.compare([missing_name, name], "cpu", repeats=1, new_tokens=2)
    missing, ours = results
    assert (missing.name, missing.figures) == ("engines.vllm", [])
    assert "vllm" in missing.skipped
    keys = [f"engines.{name}.b{streams}.tokens_per_s" for streams in (1, 8, 32)]
    assert [figure.key for figure in ours.figures] == [*keys, f"engines.{name}.abort_ms"]
    assert all(figure.median > 0 for figure in ours.figures)
    assert card.engine == name
