"""OpenAI's own SDK."""

import json

import openai
from checks import FUNCTION, HELLO, MODEL, SCHEMA, matches, run


def _client(url: str, **options: object) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", **options)


def check_chat(url: str) -> None:
    answer = _client(url).chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 8 and answer.choices[0].finish_reason == "length"


def check_stream(url: str) -> None:
    asked = {"model": MODEL, "messages": HELLO, "max_tokens": 8, "temperature": 0}
    client = _client(url)
    chunks = list(
        client.chat.completions.create(
            **asked,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
    )
    whole = client.chat.completions.create(**asked).choices[0].message.content
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    counts = [c.usage.completion_tokens for c in chunks]
    assert counts == sorted(counts) and counts[-1] == 8
    with client.chat.completions.stream(**asked) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
    assert "".join(pieces) == whole


def check_completions(url: str) -> None:
    client = _client(url)
    text = client.completions.create(model=MODEL, prompt="The fox", extra_body={"ignore_eos": True})
    assert text.usage.completion_tokens == 16  # unless asked, as OpenAI has it
    two = client.completions.create(model=MODEL, prompt=["The fox", "A bird"], n=2, max_tokens=2)
    assert [choice.index for choice in two.choices] == [0, 1, 2, 3]
    likely = client.completions.create(model=MODEL, prompt="The fox", max_tokens=4, logprobs=2)
    assert all(2 <= len(top) <= 3 for top in likely.choices[0].logprobs.top_logprobs)


def check_logprobs(url: str) -> None:
    answer = _client(url).chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 3 and all(len(entry.top_logprobs) == 3 for entry in entries)


def check_too_long_is_named(url: str) -> None:
    client = _client(url)
    room = client.models.retrieve(MODEL).max_model_len
    try:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "fox " * 2 * room}]
        )
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded"
        assert f"maximum context length is {room} tokens" in error.message
    else:
        raise AssertionError("it should have been refused")


def check_responses(url: str) -> None:
    client = _client(url)
    asked = {"model": MODEL, "max_output_tokens": 8, "temperature": 0}
    first = client.responses.create(**asked, input="Tell me a story.", instructions="Be brief.")
    assert first.output_text and first.usage.output_tokens <= 8
    again = client.responses.retrieve(first.id)
    assert (again.id, again.output_text) == (first.id, first.output_text)
    more = client.responses.create(**asked, input="Go on.", previous_response_id=first.id)
    assert more.usage.input_tokens > first.usage.input_tokens
    listed = [{"role": "user", "content": "Tell me a story."}, *first.output]
    listed.append({"role": "user", "content": "Go on."})
    same = client.responses.create(**asked, input=listed, store=False)
    assert same.output_text == more.output_text
    client.responses.delete(first.id)


def check_responses_stream(url: str) -> None:
    asked = {"model": MODEL, "max_output_tokens": 400, "temperature": 0, "input": "Hello."}
    client = _client(url)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == client.responses.create(**asked).output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type in ("response.completed", "response.incomplete")


def check_what_lm_eval_asks(url: str) -> None:
    answer = _client(url).completions.create(
        model=MODEL, prompt="The fox ran.", max_tokens=0, echo=True, logprobs=1
    )
    (choice,) = answer.choices
    assert choice.text == "The fox ran." and choice.logprobs.token_logprobs[0] is None
    assert all(logprob <= 0 for logprob in choice.logprobs.token_logprobs[1:])


def check_structured_output(url: str) -> None:
    client = _client(url)
    limits = {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA}}
    chat = client.chat.completions.create(
        model=MODEL, messages=HELLO, response_format=limits, max_tokens=100
    )
    assert matches(json.loads(chat.choices[0].message.content))
    limits = {"type": "json_schema", "name": "f", "schema": SCHEMA}
    answer = client.responses.create(
        model=MODEL, input="Weather?", text={"format": limits}, max_output_tokens=100
    )
    assert answer.status == "completed" and matches(json.loads(answer.output_text))


def check_tools(url: str) -> None:
    client = _client(url)
    asked = {
        "model": MODEL,
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 100,
        "temperature": 0,
    }
    answer = client.chat.completions.create(**asked, messages=HELLO).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and matches(json.loads(call.function.arguments))
    chunks = client.chat.completions.create(**asked, messages=HELLO, stream=True)
    deltas = [d for c in chunks for d in c.choices[0].delta.tool_calls or ()]
    arguments = "".join(delta.function.arguments for delta in deltas)
    assert arguments == call.function.arguments and deltas[0].function.name == "forecast"
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    more = client.chat.completions.create(
        **asked | {"tool_choice": "none", "max_tokens": 4},
        messages=[*HELLO, answer.message, result],
    )
    assert not more.choices[0].message.tool_calls


def check_tools_in_responses(url: str) -> None:
    client = _client(url)
    asked = {"model": MODEL, "tools": [{"type": "function", "strict": True, **FUNCTION}]}
    asked |= {"max_output_tokens": 100, "temperature": 0}
    forced = {"tool_choice": "required", "parallel_tool_calls": False}
    first = client.responses.create(**asked, **forced, input="Weather?")
    (call,) = first.output
    assert call.type == "function_call" and matches(json.loads(call.arguments))
    with client.responses.stream(**asked, **forced, input="Weather?") as stream:
        (same,) = stream.get_final_response().output
    assert same.arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    more = client.responses.create(
        **asked | {"max_output_tokens": 4}, input=[result], previous_response_id=first.id
    )
    assert more.status == "incomplete"


def check_a_timeout_is_a_deadline(url: str) -> None:
    raw = _client(url, timeout=20.0).chat.completions.with_raw_response.create(
        model=MODEL, messages=HELLO, max_tokens=4
    )
    left_ms = float(raw.headers["X-Deadline-Budget"].rpartition("left=")[2])
    assert 0 < left_ms <= 20_000
    try:
        _client(url, max_retries=5).chat.completions.create(
            model=MODEL, messages=HELLO, extra_body={"deadline_ms": 0.01}
        )
    except openai.APIStatusError as error:
        assert error.status_code == 504 and error.response.headers["x-should-retry"] == "false"
    else:
        raise AssertionError("it should have been too late")


run(globals())
