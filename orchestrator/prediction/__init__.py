"""Predicts the time that work takes, and ranks work by the value of running it now.

- ``step_model``     times of engine steps and of work in steps: pure, frozen
- ``step_learner``   fits it to a worker's totals
- ``answer_length``  distributions of answer lengths
- ``urgency``        ranks work by deadline, length and cost
- ``forecaster``     combines these for a task: its times and its place in the queue
- ``forecast``       simulates a schedule: pure
- ``schedule``       the schedule as it is now: chances, starts, ends
- ``promises``       deadlines that were promised to clients, and the time to keep them
- ``quotes``         the chance by deadline before a request is sent, and reservations
- ``feasibility``    work that will miss its deadline: refuse, observe, sample
"""
