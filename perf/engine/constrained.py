"""Steps whose rows match a grammar, beside the same rows without one."""

import json
from typing import TYPE_CHECKING, Final

from perf import SEED
from perf.engine.runs import NEVER
from perf.report.bundle import Figure
from perf.report.stats import median
from worker.core import Job
from worker.protocol import Grammar, GrammarKind, Sampling

if TYPE_CHECKING:
    from perf.engine.parts import EngineBench

_PROMPT_TOKENS: Final = 32
_STEPS: Final = 16
_SCHEMA: Final = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "minItems": 1000,
}
"""Schema of a text that does not end before it is cut."""


def constrained(bench: "EngineBench") -> list[Figure]:
    """Steps whose rows all match a JSON schema, beside free ones, in turns."""
    if bench.rig.loaded.grammars is None:
        raise RuntimeError("this installation has no llguidance")
    figures = []
    for batch in bench.load.batches:
        free_ms, masked_ms, ratios = [], [], []
        for i in range(bench.load.repeats + 1):
            free, masked = _step_ms(bench, batch, False), _step_ms(bench, batch, True)
            if i:  # the first is the warm-up
                free_ms.append(free)
                masked_ms.append(masked)
                ratios.append(masked / free)
        at, label = f"constrained.b{batch}", f"batch {batch}"
        figures += [
            Figure.of(f"{at}.free_ms", f"{label}: free step", "ms", free_ms),
            Figure.of(f"{at}.schema_ms", f"{label}: all rows match a schema", "ms", masked_ms),
            Figure.of(f"{at}.ratio", f"{label}: with the schema ÷ free", "", ratios),
        ]
    return figures


def _step_ms(bench: "EngineBench", batch: int, with_schema: bool) -> float:
    rig, grammars = bench.rig, bench.rig.loaded.grammars
    assert grammars is not None
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(_SCHEMA))
    jobs = []
    for row in range(batch):
        sampling = Sampling(
            max_tokens=min(_STEPS, bench.load.new_tokens),
            temperature=0.0,
            seed=SEED + row,
            ignore_eos=not with_schema,
        )
        constraint = grammars.constraint(grammar) if with_schema else None
        ids = rig.prompts.draw(_PROMPT_TOKENS)
        jobs.append(Job(ids, sampling, NEVER, constraint=constraint))
    runs = [rig.submit_job(job) for job in jobs]
    rig.wait(*runs)
    return median([gap for run in runs for gap in run.gaps_s[1:]]) * 1e3
