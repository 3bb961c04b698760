"""Reports of runs: figures, their statistics, tables, and what they were measured on.

- ``bundle``   figures with machine, command, commit and digests, as JSON
- ``stats``    medians, percentiles, spread
- ``table``    a bundle for people
- ``rows``     lines of the GPU checks
- ``machine``  what a run ran on
"""
