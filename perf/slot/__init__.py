"""The slot pipeline, measured from outside: by plain ``tritonclient`` on the real Triton.

- ``stack``   a Triton with the slot model
- ``client``  one recipe and what became of it
- ``usage``   memory, files and threads of a server with all of its processes
- ``soak``    an hour of clips, cancels and mistakes: does anything grow?
"""
