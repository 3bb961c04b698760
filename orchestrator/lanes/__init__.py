"""Lanes: few long-lived ``ModelStreamInfer`` calls that carry every job to a Triton instance.

- ``wire``   lane messages and frames in and out of Triton's protobuf
- ``lane``   one lane: connects, submits, reads frames, reconnects
"""

from orchestrator.lanes.lane import JobSink, Lane, LaneConfig, LaneOwner

__all__ = ["JobSink", "Lane", "LaneConfig", "LaneOwner"]
