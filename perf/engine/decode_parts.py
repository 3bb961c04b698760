"""Decodes that are not alike: one long context among short ones, and tokens that are drawn."""

from typing import TYPE_CHECKING, Final

from perf import SEED
from perf.engine.runs import NEVER, EngineRun
from perf.report.bundle import Figure
from perf.report.stats import median
from worker.core import Job
from worker.protocol import AbortCause, Sampling

if TYPE_CHECKING:
    from perf.engine.parts import EngineBench

_PROMPT_TOKENS: Final = 32
_STEPS: Final = 16
"""Steps of each measurement, whose median counts: the prompts before them take longer."""
_LONG_TOKENS: Final = 3_900
_DRAWN: Final = {"flat": 1.0, "peaked": 0.1}
"""Temperatures for drawn tokens, by the kind of distribution they make: random weights give flat
logits."""
_TOP_P: Final = 0.95


def lengths(bench: "EngineBench") -> list[Figure]:
    """Steps of short contexts, and of the same ones with a long one among them, in turns."""
    rig, new = bench.rig, min(_STEPS, bench.load.new_tokens)
    batch = bench.load.batches[-1]
    room = rig.engine.scheduler.config.context_tokens - 2 * new
    ids = rig.prompts.draw(min(_LONG_TOKENS, room))
    rig.ask(ids, 1)  # from then on its prefix is cached
    short_ms, mixed_ms, ratios = [], [], []
    for i in range(bench.load.repeats + 1):
        shorts = [rig.submit(rig.prompts.draw(_PROMPT_TOKENS), 10 * new) for _ in range(batch - 1)]
        rig.wait(*shorts, tokens=new)
        late = rig.ask(ids, new)
        for run in shorts:
            rig.engine.cancel(run.job, AbortCause.CANCEL)
        rig.wait_ended(*shorts)
        first, last = late.token_times[0], late.token_times[-1]
        before = _gaps(shorts, shorts[-1].token_times[1], late.submitted_at)
        meanwhile = _gaps(shorts, first, last)
        if i and before and meanwhile:
            short_ms.append(median(before) * 1e3)
            mixed_ms.append(median(meanwhile) * 1e3)
            ratios.append(mixed_ms[-1] / short_ms[-1])
    label = f"{batch - 1} rows of about {_PROMPT_TOKENS + new} tokens"
    return [
        Figure.of("lengths.short_ms", f"{label}: step", "ms", short_ms),
        Figure.of("lengths.mixed_ms", f"and one of {len(ids)}: step", "ms", mixed_ms),
        Figure.of("lengths.ratio", "with the long one ÷ without", "", ratios),
    ]


def drawn(bench: "EngineBench") -> list[Figure]:
    """Steps whose tokens are drawn, with temperature and ``top_p``, beside greedy ones in turns."""
    figures = []
    for batch in bench.load.batches:
        greedy_ms: list[float] = []
        drawn_ms: dict[str, list[float]] = {name: [] for name in _DRAWN}
        for i in range(bench.load.repeats + 1):
            plain = _step_ms(bench, batch, 0.0)
            if i:
                greedy_ms.append(plain)
            for name, heat in _DRAWN.items():
                step = _step_ms(bench, batch, heat)
                if i:
                    drawn_ms[name].append(step)
        at = f"drawn.b{batch}"
        figures.append(Figure.of(f"{at}.greedy_ms", f"batch {batch}: greedy step", "ms", greedy_ms))
        for name, steps in drawn_ms.items():
            label = f"batch {batch}: top_p {_TOP_P}, {name}"
            ratios = [step / plain for step, plain in zip(steps, greedy_ms, strict=True)]
            figures += [
                Figure.of(f"{at}.{name}_ms", f"{label}: step", "ms", steps),
                Figure.of(f"{at}.{name}_ratio", f"{label} ÷ greedy", "", ratios),
            ]
    return figures


def _step_ms(bench: "EngineBench", batch: int, heat: float) -> float:
    rig = bench.rig
    sampling = Sampling(
        max_tokens=min(_STEPS, bench.load.new_tokens),
        temperature=heat,
        top_p=_TOP_P if heat else 1.0,
        seed=SEED,
        ignore_eos=True,
    )
    runs = [
        rig.submit_job(Job(rig.prompts.draw(_PROMPT_TOKENS), sampling, NEVER)) for _ in range(batch)
    ]
    rig.wait(*runs)
    return median([gap for run in runs for gap in run.gaps_s[1:]]) * 1e3


def _gaps(runs: list[EngineRun], begin: float, end: float) -> list[float]:
    """Gaps in seconds between tokens that came from ``begin`` to ``end``."""
    return [
        later - earlier
        for run in runs
        for earlier, later in zip(run.token_times, run.token_times[1:], strict=False)
        if begin <= earlier and later <= end
    ]
