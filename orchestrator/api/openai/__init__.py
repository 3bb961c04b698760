"""``/v1``: chat completions, completions, embeddings, scores, files, batches, responses, models."""
