"""The demo checkpoint is small, its tokenizer loses nothing, its template is the trained one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from hypothesis import example, given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from worker import demo_model

CHECKPOINT: Final = Path(demo_model.__file__).parent / "checkpoint"
MAX_FOLDER_BYTES: Final = 10_000_000
TOKENIZER: Final = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def read_json(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CHECKPOINT / name).read_text())
    return loaded


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def decode(ids: list[int]) -> str:
    text: str = TOKENIZER.decode(ids, skip_special_tokens=False)
    return text


def render(messages: list[dict[str, Any]], add_generation_prompt: bool = False, **more: Any) -> str:
    """Render the chat template the way that transformers does."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    config = read_json("tokenizer_config.json")
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = json.dumps
    return environment.from_string(config["chat_template"]).render(
        messages=messages,
        add_generation_prompt=add_generation_prompt,
        bos_token=config["bos_token"],
        eos_token=config["eos_token"],
        **more,
    )


def test_folder_stays_below_ten_megabytes() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= MAX_FOLDER_BYTES


def test_every_file_agrees_on_the_special_tokens() -> None:
    stops = [TOKENIZER.token_to_id("<|endoftext|>"), TOKENIZER.token_to_id("<|end|>")]
    for name in ("config.json", "generation_config.json"):
        assert read_json(name)["eos_token_id"] == stops
        assert read_json(name)["bos_token_id"] == TOKENIZER.token_to_id("<|bos|>")


@given(st.text())
@example("")
@example(" leading, trailing ")
@example("tabs\tand\r\nlines\n\n\n  and   several    spaces")
@example("🦊 👩‍👩‍👧‍👦 你好 世界 नमस्ते ▁ Ġ \x00 \ufffd \u200b")
@example("<0x41> is not a byte here")
@example("<|user|>a special token survives as well<|end|>")
@settings(deadline=None, max_examples=30)
def test_any_text_comes_back_unchanged(text: str) -> None:
    assert decode(encode(text)) == text


def test_the_template_renders_the_format_that_training_used() -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": " hi \n"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "bye"},
    ]
    head = "<|bos|><|system|>Be kind.<|end|><|user|>hi<|end|><|assistant|>Hello!<|end|>"
    assert render(messages) == head + "<|user|>bye<|end|>"
    assert render(messages, add_generation_prompt=True).endswith("<|end|><|assistant|>")


def test_the_template_knows_tools() -> None:
    """In Hermes' format; what has no tools looks as the model was trained on."""
    function = {"name": "get_weather", "arguments": {"city": "Bonn"}}
    call = {"id": "1", "type": "function", "function": function}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "Rain.", "tool_call_id": "1"},
    ]
    written = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
    text = render(messages, tools=[{"type": "function", "function": {"name": "get_weather"}}])
    assert text.startswith("<|bos|><|system|>Be kind.\n\n") and '"name": "get_weather"}}\n' in text
    assert text.endswith(
        f"<|end|><|user|>Where?<|end|><|assistant|>{written}\n{written}<|end|>"
        "<|user|><tool_response>\nRain.\n</tool_response><|end|>"
    )
