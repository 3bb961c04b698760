"""Lanes: connections to an instance that carry all of its jobs.

- ``base``   the interfaces of all kinds of lanes and their listeners; ``config``: settings
- ``lane``   uses one ``ModelStreamInfer`` call of Tidegate's worker: connects, submits, reconnects
- ``grpc_call`` such a call, on the event loop, over ``h2``
- ``reconnector`` repeats sessions with a peer, with pauses between them; clips use it too
- ``wire``   converts messages and frames to and from Triton's protobuf; only it builds those
- ``swap_call`` asks a worker to serve another model
- ``endpoint`` parses the URLs of other kinds of instances
- ``servers/`` lanes to those; ``sse`` reads their event streams
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
    """A lane for the instance ``entry``, by its kind."""
    if not is_url(entry):
        return StreamLane(entry, config, owner, clock, rng)
    endpoint = read_endpoint(entry)
    return HTTP_LANES[endpoint.kind](endpoint, config, owner, clock, rng)
