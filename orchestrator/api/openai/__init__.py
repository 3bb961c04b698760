"""``/v1``: chat completions, completions, embeddings, files, batches, responses, models."""
