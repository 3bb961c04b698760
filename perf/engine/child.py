"""One engine in a process of its own, which measures when it is told to.

    python -m perf.engine.child NAME CHECKPOINT SETTINGS

Lines of JSON: first ``Ready`` or ``Absent``, then for each ``Order`` on standard input a list of
numbers. What libraries print goes to standard error.
"""

import os
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from perf.engine.runs import EngineRun, Prompts, Runs, greedy
from protocol import AbortCause, ModelCard
from worker.engines import load_engine
from worker.errors import LoadError
from worker.settings import WorkerSettings

_PATIENCE_S: Final = 300.0
_BEGUN: Final = 4
"""Tokens that a stream has before it is cancelled."""


class Order(msgspec.Struct, frozen=True):
    """Order for ``streams`` jobs of ``new_tokens`` each; ``aborts``: all are cancelled once
    begun."""

    streams: int
    prompt_tokens: int
    new_tokens: int
    aborts: bool = False


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is loaded; its card, without what is long."""

    card: ModelCard


class Absent(msgspec.Struct, frozen=True, tag="absent"):
    """The engine cannot be loaded here, and why."""

    why: str


def main(name: str, checkpoint: str, settings: str) -> int:
    """Load the engine, then measure until standard input ends."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def say(what: object) -> None:
        out.write(msgspec.json.encode(what) + b"\n")
        out.flush()

    values = {"engine": name, "model_path": Path(checkpoint)} | msgspec.json.decode(settings)
    try:
        loaded = load_engine(WorkerSettings(**values))
    except (LoadError, ImportError) as error:
        say(Absent(str(error)))
        return 0
    runs = Runs(loaded.engine)
    loaded.engine.start(runs.take)
    prompts = Prompts(loaded.card.vocab_size)
    say(Ready(msgspec.structs.replace(loaded.card, tokenizer_json=b"", chat_template="")))
    try:
        for line in sys.stdin:
            order = msgspec.json.decode(line, type=Order)
            say((_aborts if order.aborts else _speed)(runs, prompts, order))
    finally:
        loaded.engine.stop()
    return 0


def _submit(runs: Runs, prompts: Prompts, order: Order) -> list[EngineRun]:
    drawn = [prompts.draw(order.prompt_tokens) for _ in range(order.streams)]
    return [runs.submit(greedy(ids, order.new_tokens)) for ids in drawn]


def _speed(runs: Runs, prompts: Prompts, order: Order) -> list[float]:
    """Tokens per second, computing the prompts included."""
    started = _submit(runs, prompts, order)
    runs.wait_ended(*started)
    for one in started:
        assert one.finished is not None
        if one.finished.code is not None or len(one.ids) != order.new_tokens:
            raise RuntimeError(f"a job ended with {one.finished.code} after {len(one.ids)} tokens")
    seconds = max(one.token_times[-1] for one in started) - started[0].submitted_at
    return [order.streams * order.new_tokens / seconds]


def _aborts(runs: Runs, prompts: Prompts, order: Order) -> list[float]:
    """Milliseconds from a cancel to the event that says that slot and blocks are free, of each
    stream but the last, one after the other."""
    started = _submit(runs, prompts, order)
    took = []
    if not runs.wait_for(lambda: all(len(one.ids) >= _BEGUN for one in started), _PATIENCE_S):
        raise TimeoutError(f"no tokens from the engine within {_PATIENCE_S:g} s")
    for one in started[:-1]:
        if one.finished is not None:
            continue
        began = time.perf_counter()
        runs.engine.cancel(one.job, AbortCause.CANCEL)
        runs.wait_ended(one)
        took.append((time.perf_counter() - began) * 1e3)
    runs.engine.cancel(started[-1].job, AbortCause.CANCEL)
    runs.wait_ended(*started)
    return took


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
