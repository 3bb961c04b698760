"""Off loopback Triton is started only when those who reach it are asked for something."""

import asyncio
from typing import Any

import pytest

from catalog.errors import PortsUnguarded
from pool.events import PoolEvent
from pool.fleet.specs import LaunchSpec
from pool.launcher import PoolLaunch
from tests.support.cases import for_each

PLAIN = {"TIDEGATE_WORKER__PLAIN__TOKEN": "p"}


def launcher(**changes: Any) -> PoolLaunch:
    return PoolLaunch(LaunchSpec(**changes), lambda event: None)


@for_each("host", ["0.0.0.0", "", "::", "10.1.2.3", "triton.example"])
@for_each(
    ("given", "lacks_lane", "lacks_plain"),
    [
        ({"serve": False}, True, True),
        ({"serve": False, "lane_token": "t"}, False, True),
        ({"serve": False, "worker_env": PLAIN}, True, False),
        ({"serve": False, "triton_open": True}, True, False),
        ({"serve": True}, False, True),
    ],
)
async def test_what_is_open_to_others_is_refused_with_what_to_do(
    host: str, given: dict[str, Any], lacks_lane: bool, lacks_plain: bool
) -> None:
    events: list[PoolEvent] = []
    launched = PoolLaunch(LaunchSpec(triton_host=host, **given), events.append)
    with pytest.raises(PortsUnguarded) as raised:
        await launched.run(asyncio.Event())
    said = str(raised.value)
    assert said.startswith(f"Triton would listen on {host or 'every address'}, which is not loop")
    assert ("TIDEGATE_LANES__TOKEN" in said) is lacks_lane
    assert ("TIDEGATE_WORKER__PLAIN__TOKEN" in said and "--triton-open" in said) is lacks_plain
    assert not events, "nothing was started"


@for_each(
    "given",
    [
        {"triton_host": "127.0.0.1", "serve": False},
        {"triton_host": "::1"},
        {"triton_host": "0.0.0.0", "worker_env": PLAIN},
        {"triton_host": "0.0.0.0", "triton_open": True},
        {"triton_host": "0.0.0.0", "triton_open": True, "serve": False, "lane_token": "t"},
    ],
)
def test_what_is_guarded_may_start(given: dict[str, Any]) -> None:
    launcher(**given)._require_guard()


def test_the_slot_model_asks_for_no_token_and_so_must_be_opened_by_name() -> None:
    models = ("llm", "slot")
    with pytest.raises(PortsUnguarded, match="the slot model asks for no token"):
        launcher(triton_host="0.0.0.0", worker_env=PLAIN, models=models)._require_guard()
    launcher(triton_host="0.0.0.0", triton_open=True, models=models)._require_guard()


def test_each_start_makes_up_a_lane_token_of_its_own() -> None:
    tokens = {launcher()._lane_token for _ in range(8)}
    assert len(tokens) == 8 and min(map(len, tokens)) >= 40
    assert launcher(lane_token="chosen")._lane_token == "chosen"
    assert launcher(serve=False)._lane_token == "", "an orchestrator elsewhere could not know it"
