"""Makes a job's text match a grammar, by a mask over the vocabulary for each token.

- ``compiler``    compiles grammars to matchers, on its own threads; keeps the latest
- ``constraint``  a grammar with the progress of one job's text in it
- ``closing`` narrows it as its deadline nears, so that the text ends whole
- ``masks``       the masks of a step's rows, made while the model computes

::

    submit ─▶ compiler ─▶ constraint of the job            (only this request waits)
                              │ step
    engine    plan ───────────┼─▶ forward ──────────────┐
    masks         latest token └─▶ advance, fill masks ─┴─▶ sampler
"""
