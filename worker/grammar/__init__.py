"""Makes a job's text match a grammar, by a mask over the vocabulary for each token.

- ``compiler``    compiles grammars to matchers, on its own threads; caches the latest
- ``constraint``  a grammar and one job's progress in it
- ``closing`` narrows the allowed tokens as the deadline nears, so that the text ends whole
- ``masks``       makes the masks of a step's rows while the model computes

::

    submit ─▶ compiler ─▶ constraint of the job            (only this request waits)
                              │ step
    engine    plan ───────────┼─▶ forward ──────────────┐
    masks         latest token └─▶ advance, fill masks ─┴─▶ sampler
"""
