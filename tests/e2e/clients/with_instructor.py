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


def check_tools_and_json_schema(url: str) -> None:
    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="unused")
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        found = instructor.from_openai(plain, mode=mode).chat.completions.create(
            model=MODEL, messages=HELLO, response_model=Forecast, max_retries=0, max_tokens=200
        )
        assert found.days < 8


run(globals())
