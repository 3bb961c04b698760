"""Chat templates render as ``transformers`` renders them, and never without an end."""

import pytest

from orchestrator.prompts import chat_template
from orchestrator.prompts.chat_template import ChatTemplate
from orchestrator.prompts.turns import BadTemplate, Refused
from tests.support.cases import for_each
from tests.support.lazy import Lazy

chat_template_utils = Lazy("transformers.utils.chat_template_utils")
MESSAGES = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": 'Größe & <b> "x"'},
    {"role": "assistant", "content": "'ok' \u2028"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

GENERATION = """
{{- bos_token }}
{% for message in messages %}
    {%- if message.role == 'assistant' %}
        {% generation %}
        {{- message.content + eos_token }}{% if not loop.last %}|{% endif %}
        {% set seen = 1 %}
        {% endgeneration %}
        {{- seen is defined }}
    {%- else -%}
        {{ '<|' + message['role'] + '|>' }}{{ message.content }}
    {%- endif %}
{% endfor %}
{%- if add_generation_prompt %}{% generation %}{% endgeneration %}<|assistant|>{% endif %}
"""


@for_each(
    "source",
    [
        GENERATION,
        "{{ messages|tojson }}",
        "{{ messages|tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}",
        "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}x{% endfor %}",
        "{{ strftime_now('%Y')|length }}{{ strftime_now('%Z') }}",
        "{{ nothing }}{{ messages[7] }}{{ messages[0].nothing }}",
        "{% macro say(m) %}[{{ m.content|trim }}]{% endmacro %}"
        "{% for m in messages %}{{ say(m) }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}"
        "{% set ns.n = ns.n + m.content|length %}{% endfor %}{{ ns.n }}",
    ],
)
def test_renders_as_transformers_does(source: str) -> None:
    rendered, _ = chat_template_utils.render_jinja_template(
        [MESSAGES], chat_template=source, add_generation_prompt=True, **SPECIAL
    )
    assert ChatTemplate(source).render(MESSAGES, SPECIAL) == rendered[0]


@for_each(
    ("source", "why"),
    [
        ("{% if %}", "line 1"),
        ("\n{% nothing %}", "line 2.*nothing"),
        ("{% generation %}", "endgeneration"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "nested"),
        ("{{ " + "(" * 100_000 + " }}", "Recursion"),
    ],
)
def test_what_cannot_be_read_says_why(source: str, why: str) -> None:
    with pytest.raises(BadTemplate, match=why):
        ChatTemplate(source)


ENDLESS = {
    "loops in loops": "{% for m in messages %}{% for n in messages %}{% for o in messages %}"
    "{% for p in messages %}{% endfor %}{% endfor %}{% endfor %}{% endfor %}",
    "without a call": "{% for m in messages %}{% for n in messages %}{% for o in messages %}"
    "{% for p in messages %}{{ p is none }}{% endfor %}{% endfor %}{% endfor %}{% endfor %}",
    "a loop that calls itself": "{% for m in messages recursive %}{% if loop.depth < 12 %}"
    "{{ loop(messages) }}{% endif %}{% endfor %}",
    "a macro that calls itself": "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}"
    "{{ twice(n - 1) }}{% endif %}{% endmacro %}{{ twice(60) }}",
    "skipped turns": "{% for m in messages %}{% for n in messages if false %}{% endfor %}"
    "{% for n in messages %}{% for o in messages %}{% for p in messages %}{% continue %}"
    "{% endfor %}{% endfor %}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_rendering_has_an_end(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_CPU_S", 0.05)
    monkeypatch.setattr(chat_template, "MAX_GROWTH", 10**6)  # a fast machine would get there first
    template = ChatTemplate(source)
    with pytest.raises(Refused, match=r"more than 0\.05 s"):
        template.render([{"role": "user", "content": "x"}] * 40, {})


def test_a_rendered_text_is_bounded_by_its_messages() -> None:
    template = ChatTemplate("{% for m in messages %}{{ messages }}{% endfor %}")
    assert template.render(MESSAGES, {}) == str(MESSAGES) * 3
    with pytest.raises(Refused, match="too long"):
        template.render([{"role": "user", "content": "x" * 5000}] * 200, {})


def test_a_refusal_quotes_no_more_than_a_little() -> None:
    template = ChatTemplate("{{ raise_exception(messages[0].content) }}")
    with pytest.raises(Refused) as caught:
        template.render([{"role": "user", "content": "x" * 10_000}], {})
    assert len(str(caught.value)) < 300
