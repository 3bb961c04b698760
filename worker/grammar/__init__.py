"""Has the text of a job match a grammar: a mask over the vocabulary for each of its tokens.

- ``compiler``    grammars to matchers, on threads of its own, the latest kept
- ``constraint``  how far the text of one job has come
- ``masks``       the masks of a step's rows, made while the model computes

::

    submit ─▶ compiler ─▶ constraint of the job            (the request waits; nobody else does)
                              │ step
    engine    plan ───────────┼─▶ forward ──────────────┐
    masks         latest token └─▶ advance, fill masks ─┴─▶ sampler
"""
