"""Instructor: answers as Pydantic models."""

from typing import Literal

import instructor
import openai
from checks import HELLO, MODEL, run
from pydantic import BaseModel, Field


class Forecast(BaseModel):
    """Of what the demo model has never heard: only a grammar makes it hold."""

    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=7)


def _create(url: str, mode: instructor.Mode) -> Forecast:
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused"), mode=mode
    )
    return client.chat.completions.create(
        model=MODEL, messages=HELLO, response_model=Forecast, max_retries=0, max_tokens=200
    )


def check_tools(url: str) -> None:
    assert _create(url, instructor.Mode.TOOLS).days < 8


def check_json_schema(url: str) -> None:
    assert _create(url, instructor.Mode.JSON_SCHEMA).days < 8


run(globals())
