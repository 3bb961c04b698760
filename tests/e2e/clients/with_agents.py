"""OpenAI's Agents SDK, which speaks Responses."""

import asyncio
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import MODEL, run, run_the_pages
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)  # it would tell OpenAI
SETTINGS = ModelSettings(temperature=0, max_tokens=1000)


def _model(url: str) -> OpenAIResponsesModel:
    return OpenAIResponsesModel(MODEL, AsyncOpenAI(base_url=f"{url}/v1", api_key="unused"))


def check_a_conversation(url: str) -> None:
    async def talk() -> None:
        agent = Agent(
            "teller", instructions="Be brief.", model=_model(url), model_settings=SETTINGS
        )
        first = await Runner.run(agent, "Tell me a story.")
        said = [*first.to_input_list(), {"role": "user", "content": "Go on."}]
        by_items = await Runner.run(agent, said)
        by_id = await Runner.run(agent, "Go on.", previous_response_id=first.last_response_id)
        assert first.final_output and by_id.final_output == by_items.final_output

    asyncio.run(talk())


class Forecast(BaseModel):
    """Of what the demo model has never heard: only a grammar makes it hold."""

    city: Literal["Oslo", "Rome"]


def check_an_output_type(url: str) -> None:
    async def ask() -> None:
        agent = Agent("seer", model=_model(url), output_type=Forecast, model_settings=SETTINGS)
        answer = await Runner.run(agent, "Weather?")
        assert answer.final_output.city in ("Oslo", "Rome")

    asyncio.run(ask())


def check_a_tool_is_called(url: str) -> None:
    called = []

    @function_tool
    def forecast(city: Literal["Oslo", "Rome"]) -> str:
        """The weather to come."""
        called.append(city)
        return "rain"

    async def ask() -> None:
        settings = SETTINGS.resolve(ModelSettings(tool_choice="required"))
        agent = Agent("seer", model=_model(url), tools=[forecast], model_settings=settings)
        whole = await Runner.run(agent, "Weather?")
        streamed = Runner.run_streamed(agent, "Weather?")
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output == whole.final_output
        assert len(called) == 2 and called[0] == called[1]

    asyncio.run(ask())


def check_a_run_that_knows_its_time(url: str) -> None:
    run_the_pages("agents", url)


run(globals())
