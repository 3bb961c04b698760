"""Makes the lane that an instance's kind needs."""

import random

from orchestrator.clock import Clock
from orchestrator.lanes.base import Lane, LaneOwner
from orchestrator.lanes.config import LaneConfig
from orchestrator.lanes.endpoint import ServerKind, is_url, read_endpoint
from orchestrator.lanes.http.http_lane import HttpLane, HttpPool
from orchestrator.lanes.http.llamacpp import LlamaCppLane
from orchestrator.lanes.http.tgi import TgiLane
from orchestrator.lanes.http.vllm import VllmLane
from orchestrator.lanes.lane import StreamLane

_HTTP: dict[ServerKind, type[HttpLane]] = {
    ServerKind.VLLM: VllmLane,
    ServerKind.LLAMACPP: LlamaCppLane,
    ServerKind.TGI: TgiLane,
}


class LaneFactory:
    """Makes lanes of all kinds, with one HTTP client for those that need one."""

    def __init__(self) -> None:
        self._pool = HttpPool()

    def __call__(
        self, entry: str, config: LaneConfig, owner: LaneOwner, clock: Clock, rng: random.Random
    ) -> Lane:
        if not is_url(entry):
            return StreamLane(entry, config, owner, clock, rng)
        endpoint = read_endpoint(entry)
        if endpoint.kind is ServerKind.TRITON:
            from orchestrator.lanes.plain_lane import PlainLane  # with gRPC's own client

            return PlainLane(endpoint, config, owner, clock, rng)
        return _HTTP[endpoint.kind](endpoint, config, owner, clock, rng, self._pool)
