"""The scripted model: whole engines on the demo model's tokenizer; and bad scripts."""

import json
from pathlib import Path

import pytest

from catalog.paths import DEMO_CHECKPOINT
from orchestrator.parsing.call_grammar import forced_calls
from orchestrator.parsing.formats import CallFormat, OutputFormat
from orchestrator.parsing.parser import ToolUse
from orchestrator.parsing.rules import Rules
from orchestrator.tasks.job import Tool
from protocol import Grammar, GrammarKind, Sampling
from worker.core import Event, Job
from worker.engine.build import build_engine
from worker.engine.engine import Engine
from worker.loaded import LoadedEngine
from worker.runner.script import Script, read_script
from worker.settings import WorkerSettings
from worker.text import TextStream

OFFER = '<|bos|><|system|><tools>\n{"name": "forecast"}\n</tools><|end|>'
CALL = '<tool_call>\n{"name": "forecast", "arguments": {"city": "Oslo"}}\n</tool_call>'
SCRIPT = r"""
context_tokens = 4096

[[answers]]
when = 'weather in (\w+)'
text = 'I look.'
calls = [{ name = "forecast", arguments = { city = '\1', days = [{ about = '\1!' }] } }]

[[answers]]
when = 'weather'
text = 'I have no tools.'

[[answers]]
when = 'rain'
text = 'Take an umbrella.'
"""


def load(script: Path | None = None) -> LoadedEngine:
    stated = {} if script is None else {"script": str(script)}
    return build_engine(
        WorkerSettings(model_path=DEMO_CHECKPOINT, engine="synthetic-scripted", engine_args=stated)
    )


@pytest.fixture(scope="module")
def scripted() -> LoadedEngine:
    return load()


def said(
    loaded: LoadedEngine, prompt: str, form: Grammar | None = None, begun: str = "", **asked: int
) -> str:
    """The whole answer, with what of it was ``begun``; in ``form``, if any."""
    constraint = None
    if form is not None:
        assert loaded.grammars is not None
        constraint = loaded.grammars.constraint(form)
    sampling = Sampling(**{"max_tokens": 200, **asked})  # type: ignore[arg-type]
    ids, begun_ids = (loaded.tokenizer.encode(text) for text in (prompt, begun))
    job = Job([*ids, *begun_ids], sampling, 1e12)
    job.constraint, job.begun_tokens = constraint, len(begun_ids)
    engine = loaded.engine
    assert isinstance(engine, Engine)
    engine.submit(job)
    events: list[Event] = engine.step()
    while engine.scheduler.has_work:
        events += engine.step()
    made = [token for event in events for token in getattr(event, "ids", [])]
    engine.scheduler.check_integrity()
    return begun + "".join(TextStream(loaded.tokenizer.detokenizer()).feed(made).texts)


def test_what_a_prompt_tells_it_to_do(scripted: LoadedEngine) -> None:
    assert scripted.card.context_tokens == 131_072 and scripted.card.grammars
    assert said(scripted, "<|user|>Say hello, fox.<|end|><|assistant|>") == "hello, fox."
    call = '<|user|>Call forecast {"city": "Oslo"}<|end|><|assistant|>'
    assert said(scripted, OFFER + call) == CALL
    result = f"{CALL}<|end|><|user|><tool_response>\nrain\n</tool_response><|end|><|assistant|>"
    assert said(scripted, OFFER + call + result) == "The tool says: rain"


def test_only_what_came_since_the_last_answer_counts(scripted: LoadedEngine) -> None:
    history = "<|user|>Say one.<|end|><|assistant|>one.<|end|><|user|>Well.<|end|><|assistant|>"
    assert said(scripted, history).startswith("Tell me")


def test_the_latest_match_wins_and_groups_are_filled_in() -> None:
    script = Script(SCRIPT.encode(), "x.toml")
    arguments = '{"city": "Oslo", "days": [{"about": "Oslo!"}]}'
    call = f'<tool_call>\n{{"name": "forecast", "arguments": {arguments}}}\n</tool_call>'
    assert script.answer(OFFER, "the weather in Oslo") == f"I look.\n{call}"
    assert script.answer("", "the weather in Oslo") == "I have no tools."
    assert script.answer(OFFER, "the weather in Oslo: rain") == "Take an umbrella."
    assert script.answer(OFFER, "hello") == "The script has no answer to this."


def test_a_grammar_holds_the_answer_to_its_schema(scripted: LoadedEngine) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"enum": ["Oslo", "Rome"]},
            "days": {"type": "integer"},
            "why": {"type": "string"},
            "notes": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["city", "days", "why", "notes"],
        "additionalProperties": False,
    }
    form = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    fits = '{"city":"Rome","days":31,"why":"so","notes":["~"]}'
    assert said(scripted, f"<|user|>Say {fits}<|end|><|assistant|>", form) == fits
    for other in ("nothing", '{"city":"Bonn"}', '{"city":"Rome","x":1}', f"{fits[:-4]}~ and{{"):
        answer = json.loads(said(scripted, f"<|user|>Say {other}<|end|><|assistant|>", form))
        assert answer["city"] in ("Oslo", "Rome") and isinstance(answer["days"], int)
        assert len(answer["why"]) < 3 and len(answer["notes"]) < 2


def test_a_call_that_must_be_made(scripted: LoadedEngine) -> None:
    """The script's, where it is one; else any that the grammar allows."""
    schema = {"properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    use = ToolUse((Tool("forecast", "", schema),), must_call=True)
    forced = forced_calls(use, OutputFormat(CallFormat.HERMES), Rules({})).usual
    asked = '<|user|>Call forecast {"city":"Oslo"}<|end|><|assistant|>'
    assert said(scripted, OFFER + asked, forced) == CALL
    other = said(scripted, OFFER + "<|user|>Say no.<|end|><|assistant|>", forced)
    assert other in (CALL, CALL.replace("Oslo", "Rome"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("answers = 1", r"answers"),
        ("[[answers]", r"Expected|Invalid|expected"),
        ("", r"missing required field `answers`"),
        ("[[answers]]\nwhen = 'x'", r"answers\[0\] says nothing; give it text or calls"),
        ("[[answers]]\nwhen = '('\ntext = 'x'", r"answers\[0\].when is not a regular expression"),
        ("[[answers]]\ntext = '\\1'", r"answers\[0\] has \\1, but its `when` has 0 groups"),
        ("[[answers]]\nsays = 'x'", r"unknown field `says`"),
        ("[[answers]]\ncalls = [{ arguments = {} }]", r"missing required field `name`"),
        ("context_tokens = 1\n[[answers]]\ntext = 'x'", r"context_tokens"),
        ("[[answers]]\ntext = '\xff'", r"utf-8"),
    ],
)
def test_a_bad_script_is_refused_with_what_is_wrong(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "script.toml"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=told) as refused:
        read_script(file)
    assert str(file) in str(refused.value)


def test_a_script_that_is_not_there_and_an_argument_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.toml: the script cannot be read"):
        load(tmp_path / "none.toml")
    wrong = {"scrpt": "x", "step_ms": "-1"}
    with pytest.raises(ValueError, match=r"ENGINE_ARGS: step_ms: .*; scrpt: "):
        build_engine(
            WorkerSettings(
                model_path=DEMO_CHECKPOINT, engine="synthetic-scripted", engine_args=wrong
            )
        )
