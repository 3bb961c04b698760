"""``/v1``: chat completions, completions, models, tokens."""
