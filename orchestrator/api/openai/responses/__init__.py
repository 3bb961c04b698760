"""``/v1/responses``: OpenAI's Responses API, and what it remembers of earlier answers."""
