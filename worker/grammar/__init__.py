"""Makes a job's text match a grammar: by a mask over the vocabulary for each of its tokens.

- ``compiler``    compiles grammars to matchers, on threads of its own; keeps the latest
- ``constraint``  a grammar with the progress of one job's text in it
- ``closing``     what is left of it as its deadline nears, so that the text ends whole
- ``masks``       the masks of a step's rows, made while the model computes

::

    submit ─▶ compiler ─▶ constraint of the job            (the request waits; nobody else does)
                              │ step
    engine    plan ───────────┼─▶ forward ──────────────┐
    masks         latest token └─▶ advance, fill masks ─┴─▶ sampler
"""
