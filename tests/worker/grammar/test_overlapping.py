"""Steps that are launched before the one before them is read, some of them recorded."""

import json

from protocol import FinishReason, Grammar, GrammarKind, Sampling
from tests.support.checkpoints import DEMO
from tests.support.engine import end_of, ids_of
from tests.worker.engine.test_torch_engine import FAR, prompt, run
from tests.worker.runner.test_cuda_runner import build
from worker.core import Job
from worker.grammar.compiler import GrammarCompiler, build_compiler
from worker.models.config import read_config

SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "maximum": 999}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}


def jobs(compiler: GrammarCompiler) -> list[Job]:
    grammars = [
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
        None,
        Grammar(GrammarKind.REGEX, "[a-c]{3,9}"),
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    ]
    made = []
    for n in range(8):
        grammar = grammars[n % 4]
        sampling = Sampling(max_tokens=24, temperature=0.0 if n < 4 else 1.3, seed=n)
        constraint = None if grammar is None else compiler.constraint(grammar)
        ids = prompt(1 + n * 7 % 40, seed=n, vocabulary=2048)
        made.append(Job(ids, sampling, FAR, constraint=constraint))
    return made


def test_masks_know_of_the_token_that_is_still_on_the_device() -> None:
    """A constrained row never takes what a recording drew: its tokens are the plain runner's."""
    compiler = build_compiler((DEMO / "tokenizer.json").read_bytes(), 2048, [1, 5])
    assert compiler is not None
    assert read_config(DEMO).eos_token_ids == (1, 5)
    answers = []
    for cuda_like, graphs in ((False, False), (True, False), (True, True)):
        todo = jobs(compiler)
        events = run(build(DEMO, cuda_like=cuda_like, graphs=graphs), todo)
        answers.append([(end_of(job, events).reason, ids_of(job, events)) for job in todo])
    assert answers[0] == answers[1] == answers[2]
    reasons = [reason for reason, _ in answers[0]]
    assert reasons[2] is reasons[6] is FinishReason.STOP
