"""Lanes: connections to an instance that carry every job to it.

- ``base``   the interface of every kind of lane and of its listeners; ``config``: settings
- ``lane``   over one ``ModelStreamInfer`` call of Tidegate's worker: connects, submits, reconnects
- ``grpc_call`` such a call, on the event loop; ``http2``: the frames beneath it
- ``reconnector`` session after session with a peer, with pauses between them; slot links use it too
- ``wire``   messages and frames in and out of Triton's protobuf; the only place that builds one
- ``endpoint`` how instances of other kinds are named; ``factory`` makes the lane for each
- ``polled`` what those kinds share: jobs with deadlines, health by asking (``lane_job``, ``meter``)
- ``plain_lane`` Triton's LLM backends by their plain contract, which ``plain_contract`` speaks
- ``http/``  servers over HTTP
- ``cards`` what is known of their models; ``text_only`` for those without ids
"""

from orchestrator.lanes.base import Lane, LaneOwner
from orchestrator.lanes.config import LaneConfig
from orchestrator.lanes.endpoint import ServerKind, kind_of, name_of
from orchestrator.lanes.factory import LaneFactory
from orchestrator.lanes.lane import StreamLane

__all__ = [
    "Lane",
    "LaneConfig",
    "LaneFactory",
    "LaneOwner",
    "ServerKind",
    "StreamLane",
    "kind_of",
    "name_of",
]
