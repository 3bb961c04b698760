"""LiteLLM, which other gateways and agents call models through."""

import json
import os

from checks import FUNCTION, HELLO, MODEL, SCHEMA, matches, run

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch one when it is imported
import litellm


def _asked(url: str, **more: object) -> dict[str, object]:
    return {
        "model": f"openai/{MODEL}",
        "api_base": f"{url}/v1",
        "api_key": "unused",
        "messages": HELLO,
        "max_tokens": 8,
        "temperature": 0,
        **more,
    }


def check_completion(url: str) -> None:
    answer = litellm.completion(**_asked(url, timeout=30))
    assert answer.choices[0].message.content and answer.usage.completion_tokens == 8


def check_stream(url: str) -> None:
    chunks = list(
        litellm.completion(**_asked(url, stream=True, stream_options={"include_usage": True}))
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == litellm.completion(**_asked(url)).choices[0].message.content


def check_as_vllm_and_as_anthropic(url: str) -> None:
    for provider, base in (("hosted_vllm", f"{url}/v1"), ("anthropic", url)):
        asked = _asked(url, model=f"{provider}/{MODEL}", api_base=base)
        assert litellm.completion(**asked).choices[0].message.content


def check_responses(url: str) -> None:
    asked = {
        "model": f"openai/{MODEL}",
        "api_base": f"{url}/v1",
        "api_key": "unused",
        "input": "Tell me a story.",
        "max_output_tokens": 8,
        "temperature": 0,
    }
    answer = litellm.responses(**asked)
    assert answer.output[0].content[0].text and answer.usage.output_tokens == 8
    events = list(litellm.responses(**asked, stream=True))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == answer.output[0].content[0].text


def check_tools(url: str) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    asked = _asked(url, tools=tools, tool_choice="required", max_tokens=100)
    call = litellm.completion(**asked).choices[0].message.tool_calls[0]
    assert matches(json.loads(call.function.arguments))


def check_structured_output(url: str) -> None:
    limits = {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA}}
    answer = litellm.completion(**_asked(url, response_format=limits, max_tokens=100))
    assert matches(json.loads(answer.choices[0].message.content))


def check_too_long_is_understood(url: str) -> None:
    messages = [{"role": "user", "content": "fox " * 20_000}]
    try:
        litellm.completion(**_asked(url, messages=messages, max_retries=0))
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("it should have been refused")


run(globals())
