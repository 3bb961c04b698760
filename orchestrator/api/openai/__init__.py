"""``/v1``: chat completions, completions, embeddings, models, tokens."""
