"""Reports of runs: figures, their statistics, tables, and the machine of a run.

- ``bundle``   figures with machine, command, commit and digests, as JSON
- ``stats``    medians, percentiles, spread
- ``table``    a bundle for people
- ``machine``  the machine and the versions of a run
"""
