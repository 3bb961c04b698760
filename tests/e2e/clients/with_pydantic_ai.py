"""Pydantic AI's agents."""

from typing import Literal

from checks import FUNCTION, MODEL, matches, run
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolDefinition
from pydantic_ai.direct import model_request_sync
from pydantic_ai.messages import ModelRequest, ToolCallPart, ToolReturnPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS = {"max_tokens": 16, "temperature": 0.0, "timeout": 30.0}


class Forecast(BaseModel):
    """Of what the demo model has never heard: only a grammar makes it hold."""

    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=7)


def _provider(url: str) -> OpenAIProvider:
    return OpenAIProvider(base_url=f"{url}/v1", api_key="unused")


def check_an_agent(url: str) -> None:
    for model in (OpenAIChatModel, OpenAIResponsesModel):
        agent = Agent(model(MODEL, provider=_provider(url)), instructions="Be brief.")
        first = agent.run_sync("Tell me a story.", model_settings=SETTINGS)
        assert first.output
        said = first.all_messages()
        assert agent.run_sync("Go on.", message_history=said, model_settings=SETTINGS).output


def check_an_output_type(url: str) -> None:
    settings = SETTINGS | {"max_tokens": 200}
    for model in (OpenAIChatModel, OpenAIResponsesModel):
        for output in (Forecast, NativeOutput(Forecast)):
            agent = Agent(model(MODEL, provider=_provider(url)), output_type=output, retries=0)
            assert agent.run_sync("Weather?", model_settings=settings).output.days < 8


def check_a_tool_is_called(url: str) -> None:
    """Directly: an agent would let nobody force calls of its functions."""
    model = OpenAIChatModel(MODEL, provider=_provider(url))
    settings = SETTINGS | {"max_tokens": 200, "tool_choice": "required"}
    forecast = ToolDefinition(
        name="forecast", parameters_json_schema=FUNCTION["parameters"], description="Weather."
    )
    messages = [ModelRequest.user_text_prompt("Weather?")]
    answer = model_request_sync(
        model,
        messages,
        model_settings=settings,
        model_request_parameters=ModelRequestParameters(function_tools=[forecast]),
    )
    (call,) = [part for part in answer.parts if isinstance(part, ToolCallPart)][:1]
    assert call.tool_name == "forecast" and matches(call.args_as_dict())
    result = ToolReturnPart("forecast", "rain", tool_call_id=call.tool_call_id)
    messages += [answer, ModelRequest(parts=[result])]
    assert model_request_sync(model, messages, model_settings=SETTINGS).parts


run(globals())
