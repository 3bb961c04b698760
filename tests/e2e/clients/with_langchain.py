"""LangChain's client for OpenAI."""

from checks import FUNCTION, HELLO, MODEL, matches, run, run_the_pages
from langchain_openai import ChatOpenAI, OpenAI


def _model(url: str, max_tokens: int = 8, **more: object) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL,
        base_url=f"{url}/v1",
        api_key="unused",
        max_tokens=max_tokens,
        temperature=0,
        timeout=30,
        **more,
    )


def check_invoke(url: str) -> None:
    answer = _model(url).invoke(HELLO)
    assert answer.content and answer.usage_metadata["output_tokens"] == 8


def check_stream(url: str) -> None:
    model = _model(url, stream_usage=True)
    pieces = list(model.stream(HELLO))
    assert "".join(piece.content for piece in pieces) == model.invoke(HELLO).content
    assert sum((piece.usage_metadata or {}).get("output_tokens", 0) for piece in pieces) == 8


def check_batch(url: str) -> None:
    assert all(answer.content for answer in _model(url).batch([HELLO] * 3))


def check_responses(url: str) -> None:
    model = _model(url, use_responses_api=True)
    answer = model.invoke(HELLO)
    assert answer.text and answer.usage_metadata["output_tokens"] == 8
    assert "".join(piece.text for piece in model.stream(HELLO)) == answer.text
    more = model.bind(previous_response_id=answer.response_metadata["id"])
    assert more.invoke([{"role": "user", "content": "Go on."}]).text


def check_tools(url: str) -> None:
    for more in ({}, {"use_responses_api": True}):
        model = _model(url, 200, **more).bind_tools([FUNCTION], tool_choice="required")
        answer = model.invoke(HELLO)
        assert matches(answer.tool_calls[0]["args"])


def check_structured_output(url: str) -> None:
    model = _model(url, 200)
    for method in ("function_calling", "json_schema"):
        answer = model.with_structured_output(FUNCTION, method=method).invoke(HELLO)
        assert matches(answer)


def check_plain(url: str) -> None:
    model = OpenAI(model=MODEL, base_url=f"{url}/v1", api_key="unused", max_tokens=8)
    assert model.invoke("The fox")


def check_a_run_of_langgraph_that_knows_its_time(url: str) -> None:
    run_the_pages("langgraph.prebuilt", url)


run(globals())
