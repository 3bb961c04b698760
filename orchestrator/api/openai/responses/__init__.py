"""``/v1/responses``: OpenAI's Responses API, with its memory of earlier answers."""
