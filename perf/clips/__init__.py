"""Clips on the real Triton.

- ``__main__``      clips per minute, latency, stage times, memory
- ``soak``          an hour of clips, cancels and mistakes: does anything grow?
- ``client``        one recipe and its outcome, by plain ``tritonclient``
- ``stack``         a Triton with the slot model
"""
