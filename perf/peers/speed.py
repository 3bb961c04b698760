"""Measures the speed of the servers, in turns.

It measures a wave: a number of simultaneous stories of fixed length, until the client has the last
token of the last one, including starts and first tokens. Then it measures the first token of a
prompt alone, and of a prompt during other streams, with the longest token gap of those streams.
"""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from perf.load import drive
from perf.load.chats import PATH, at_once
from perf.load.drive import completion, ratios
from perf.load.open_loop import Result, StreamRequest
from perf.peers.servers import MODEL, Served, Start
from perf.report.bundle import Better, Figure

PROMPT_TOKENS: Final = 512
OTHERS: Final = 4
"""Number of running streams when the second prompt arrives."""
_LINGER_S = 300.0
"""llama.cpp generated 100 tokens per second in 32 streams on two idle cores."""
_BEGUN_S = 0.5
"""Seconds after which all streams have started."""


class SpeedLoad(NamedTuple):
    """Waves of each number of ``streams``, ``tokens`` each, in ``rounds`` turns per server."""

    streams: tuple[int, ...]
    tokens: int
    rounds: int


class What(NamedTuple):
    """A quantity: ``key`` and ``label`` of its figures."""

    key: str
    label: str
    unit: str
    better: Better


async def measure(starts: Sequence[Start], load: SpeedLoad, seed: int, part: str) -> list[Figure]:
    """Figures of all servers, and the ratio of the first to the second, turn by turn. ``part`` is
    the prefix of their names. Raises ``RuntimeError`` if a token was lost."""
    found = defaultdict[What, dict[str, list[float]]](dict)
    labels: dict[str, str] = {}
    for number in range(load.rounds):
        for start in starts:
            async with start() as server:
                labels[server.name] = server.label
                for what, sample in await _turn(server, load, seed + number):
                    found[what].setdefault(server.name, []).append(sample)
    return [figure for what in found for figure in _figures(part, what, found[what], labels)]


def _figures(
    part: str, what: What, found: dict[str, list[float]], labels: dict[str, str]
) -> Iterator[Figure]:
    suffix = {"tokens/s": ".tokens_per_s", "ms": "_ms"}[what.unit]
    for name, samples in found.items():
        key, label = f"{part}.{name}.{what.key}{suffix}", f"{labels[name]}, {what.label}"
        yield Figure.of(key, label, what.unit, samples, better=what.better)
    (first, ours), (second, theirs), *_ = found.items()
    good = ratios(ours, theirs) if what.better == "higher" else ratios(theirs, ours)
    label = f"{labels[first]}, times as good as {labels[second]}, {what.label}"
    yield Figure.of(f"{part}.ratio.{what.key}", label, "", good, better="higher")


async def _turn(server: Served, load: SpeedLoad, seed: int) -> list[tuple[What, float]]:
    rng, found = random.Random(seed), list[tuple[What, float]]()

    async def offer(path: str, asks: Sequence[StreamRequest]) -> list[Result]:
        return require_whole(asks, await server.offer(path, asks, _LINGER_S), server.label)

    def ask(at_s: float, prompt: int, tokens: int) -> StreamRequest:
        ids = [rng.randrange(300, 2000) for _ in range(prompt)]
        return StreamRequest(at_s, 120_000.0, completion(MODEL, tokens, ids))

    most = load.streams[-1]
    await offer(PATH, at_once(most, load.tokens // 8, seed - 1, MODEL))  # it warms up
    for count in load.streams:
        results = await offer(PATH, at_once(count, load.tokens, seed, MODEL))
        rate = load.tokens * count / max(result.end_s for result in results)
        found.append((What(str(count), f"{count} at once", "tokens/s", "higher"), rate))
    for key, count in (("prompt", 0), ("prompt_among", OTHERS)):
        streams = [ask(0.0, 16, load.tokens) for _ in range(count)]
        asks = [*streams, ask(_BEGUN_S * bool(count), PROMPT_TOKENS, 8)]
        *others, last = await offer(drive.PATH, asks)
        label = f"first token of {PROMPT_TOKENS}" + f" among {count} streams" * bool(count)
        found.append((What(key, label, "ms", "lower"), 1000 * last.first_s))
        if others:
            gap_ms = 1000 * max(result.gap_s for result in others)
            found.append((What("gap", "longest gap of those streams", "ms", "lower"), gap_ms))
    return found


def require_whole(asks: Sequence[StreamRequest], results: list[Result], label: str) -> list[Result]:
    """The results, if all answers are complete. Raises ``RuntimeError`` otherwise."""
    for ask, result in zip(asks, results, strict=True):
        tokens = ask.body["max_tokens"]
        if not result.complete or result.tokens != tokens:
            said = result.code or result.finish or "no end"
            raise RuntimeError(
                f"{label}: a stream of {tokens} tokens had {result.tokens} and ended with {said}"
            )
    return results
