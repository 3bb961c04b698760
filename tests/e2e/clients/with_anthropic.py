"""Anthropic's own SDK."""

import anthropic
from checks import HELLO, MODEL, SCHEMA, matches, run, run_the_pages

ASKED = {"model": MODEL, "messages": HELLO, "max_tokens": 8, "extra_body": {"temperature": 0}}


def check_message(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="unused")
    message = client.messages.create(**ASKED, system="Be brief.")
    assert message.content[0].text and message.stop_reason == "max_tokens"
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO, system="Be brief.")
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def check_stream(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="unused")
    with client.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().usage.output_tokens == 8
    assert text == client.messages.create(**ASKED).content[0].text


def check_tools(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="unused")
    asked = ASKED | {
        "max_tokens": 100,
        "tools": [{"name": "forecast", "description": "Weather.", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    message = client.messages.create(**asked)
    (call,) = message.content
    assert (call.type, message.stop_reason) == ("tool_use", "tool_use") and matches(call.input)
    with client.messages.stream(**asked) as stream:
        (same,) = stream.get_final_message().content
    assert same.input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    client.messages.create(
        **asked | {"messages": HELLO + turns, "tool_choice": {"type": "auto"}, "max_tokens": 4}
    )


def check_errors(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0)
    try:
        client.messages.create(**ASKED | {"model": "none"})
    except anthropic.NotFoundError as error:
        assert error.request_id
    else:
        raise AssertionError("there is no such model")


def check_a_run_that_knows_its_time(url: str) -> None:
    run_the_pages("anthropic", url)


run(globals())
