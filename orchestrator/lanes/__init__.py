"""Lanes: connections to an instance that carry every job to it.

- ``base``   the interface of every kind of lane and of its listeners; ``config``: settings
- ``lane``   over one ``ModelStreamInfer`` call of Tidegate's worker: connects, submits, reconnects
- ``grpc_call`` such a call, on the event loop, over ``h2``
- ``reconnector`` session after session with a peer, with pauses between them; clips use it, too
- ``wire``   messages and frames in and out of Triton's protobuf; the only place that builds one
- ``swap_call`` asks a worker to serve another model
- ``endpoint`` how instances of other kinds are named
- ``servers/`` lanes to those; ``sse`` reads what they stream
"""

import random

from orchestrator.clock import Clock
from orchestrator.lanes.base import Lane, LaneOwner
from orchestrator.lanes.config import LaneConfig
from orchestrator.lanes.endpoint import ServerKind, is_url, kind_of, name_of, read_endpoint
from orchestrator.lanes.lane import StreamLane
from orchestrator.lanes.servers.kinds import HTTP_LANES

__all__ = [
    "Lane",
    "LaneConfig",
    "LaneOwner",
    "ServerKind",
    "StreamLane",
    "kind_of",
    "make_lane",
    "name_of",
]


def make_lane(
    entry: str, config: LaneConfig, owner: LaneOwner, clock: Clock, rng: random.Random
) -> Lane:
    """The lane that the kind of the instance ``entry`` needs."""
    if not is_url(entry):
        return StreamLane(entry, config, owner, clock, rng)
    endpoint = read_endpoint(entry)
    return HTTP_LANES[endpoint.kind](endpoint, config, owner, clock, rng)
