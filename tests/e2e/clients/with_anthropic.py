"""Anthropic's own SDK."""

import anthropic
from checks import HELLO, MODEL, run

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


def check_errors(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0)
    try:
        client.messages.create(**ASKED | {"model": "none"})
    except anthropic.NotFoundError as error:
        assert error.request_id
    else:
        raise AssertionError("there is no such model")


run(globals())
