"""Predicts what work will take, and judges what is worth doing now.

- ``step_model``     what an engine step takes, and work in such steps: pure, frozen
- ``step_learner``   fits it to a worker's totals
- ``answer_length``  how long answers get
- ``urgency``        what a deadline makes of that
- ``forecaster``     these together, for a task: its times, and its place in the queue
- ``forecast``       plays a schedule forward: pure
- ``schedule``       the schedule as it is now: chances, starts, ends
- ``promises``       deadlines that were named to clients, and what keeping them takes
- ``quotes``         the chance by deadline before a request is sent, and reservations
- ``feasibility``    what will not be met: refuse, observe, sample
"""
