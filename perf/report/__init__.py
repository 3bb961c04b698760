"""Reports of runs: figures, their statistics, tables, and what they were measured on.

- ``bundle``   figures with machine, command, commit and digests, as JSON
- ``stats``    medians, percentiles, spread
- ``table``    a bundle for people
- ``machine``  what a run ran on
"""
