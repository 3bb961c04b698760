"""Makes a job's text match a grammar, by a mask over the vocabulary for each token.

::

    submit ─▶ compiler ─▶ constraint of the job            (only this request waits)
                              │ step
    engine    plan ───────────┼─▶ forward ──────────────┐
    masks         latest token └─▶ advance, fill masks ─┴─▶ sampler
"""
