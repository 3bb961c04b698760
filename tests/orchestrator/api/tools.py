"""Models that know tools and think, and what they say, for tests of every dialect."""

from collections.abc import Sequence
from typing import Any

from protocol import FinishReason
from tests.orchestrator.conftest import Service
from tests.support.fake_worker import FakeWorker, Plan

CARD: dict[str, Any] = {
    "context_tokens": 8192,
    "chat_template": (
        "{{ bos_token }}{% if tools %}<|system|>{% for t in tools %}{{ t|tojson }}\n{% endfor %}"
        "Answer in <tool_call></tool_call>.<|end|>{% endif %}"
        "{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{% if m.role == 'tool' %}[{{ m.name }} {{ m.tool_call_id }}] {% endif %}{{ m.content }}"
        '{% for c in m.tool_calls %}<tool_call>{"name": "{{ c.function.name }}", '
        '"arguments": {{ c.function.arguments|tojson }}}</tool_call>{% endfor %}<|end|>'
        "{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>"
        "{% if thinks %}<think>\n{% elif thinks is defined %}<think>\n\n</think>\n\n{% endif %}"
        "{% endif %}"
    ),
}
"""A model with Hermes' calls that may think; tests tell it to by ``thinks``."""

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Now.", "parameters": SCHEMA}
ARGUMENTS = '{"city": "Köln"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


def says(text: str, size: int = 3, reason: FinishReason = FinishReason.STOP) -> Plan:
    """A job that says ``text``, so many characters per token."""
    parts: Sequence[str] = [text[at : at + size] for at in range(0, len(text), size)]
    return Plan(tokens=len(parts), text=lambda at: parts[at], reason=reason)


def prompt_of(service: Service, worker: FakeWorker) -> str:
    """What the worker was asked last, special tokens and all."""
    tokens = service.orchestrator.models.resolve("fake").tokens
    return "".join(tokens.token_text(token_id) for token_id in worker.submits[-1].token_ids)
