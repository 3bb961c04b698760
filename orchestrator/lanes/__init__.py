"""Lanes: few long-lived calls that carry every job to a Triton instance.

- ``base``   what every kind of lane is and does, and who hears of it
- ``lane``   over one ``ModelStreamInfer`` call of Tidegate's worker: connects, submits, reconnects
- ``grpc_call`` such a call, on the event loop; ``http2``: the frames beneath it
- ``wire``   messages and frames in and out of Triton's protobuf; the only place that builds one
"""

from orchestrator.lanes.base import JobSink, Lane, LaneConfig, LaneOwner
from orchestrator.lanes.lane import StreamLane

__all__ = ["JobSink", "Lane", "LaneConfig", "LaneOwner", "StreamLane"]
