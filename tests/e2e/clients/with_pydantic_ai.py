"""Pydantic AI's agents."""

from checks import MODEL, run
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS = {"max_tokens": 16, "temperature": 0.0, "timeout": 30.0}


def _provider(url: str) -> OpenAIProvider:
    return OpenAIProvider(base_url=f"{url}/v1", api_key="unused")


def check_an_agent(url: str) -> None:
    agent = Agent(OpenAIChatModel(MODEL, provider=_provider(url)), instructions="Be brief.")
    first = agent.run_sync("Tell me a story.", model_settings=SETTINGS)
    assert first.output
    more = agent.run_sync("Go on.", message_history=first.all_messages(), model_settings=SETTINGS)
    assert more.output


def check_an_agent_over_responses(url: str) -> None:
    agent = Agent(OpenAIResponsesModel(MODEL, provider=_provider(url)), instructions="Be brief.")
    first = agent.run_sync("Tell me a story.", model_settings=SETTINGS)
    assert first.output
    more = agent.run_sync("Go on.", message_history=first.all_messages(), model_settings=SETTINGS)
    assert more.output


run(globals())
