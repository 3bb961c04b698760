"""Runs models that our own decoder cannot, by ``transformers``' code for them: the last resort.

Slower than our engine: no paged KV, no shared prefixes, a copy of all keys and values per step.

- ``build``       makes a loaded engine from settings
- ``checkpoint``  the library's configuration and model, with errors of ours
- ``decoder``     one forward pass, whatever the architecture calls its arguments
- ``batches``     the texts of a step: in one batch, padded on the left, or each by itself
- ``images``      images of prompts, decoded and prepared
- ``backend``     queue, prompts in chunks, sampling
"""
