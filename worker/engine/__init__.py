"""The loop that turns jobs into tokens: ``loop`` over a ``backend``, ours or another engine's."""
