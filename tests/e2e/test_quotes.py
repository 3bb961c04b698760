"""A deadline that is bought before the request is sent, on a real Triton at 20 ms a token."""

from typing import Any

import aiohttp
import pytest

from tests.e2e.conftest import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards")]

BODY = {"model": "demo", "prompt": "Tell me.", "max_tokens": 10, "ignore_eos": True}
TRIES = 5
"""A busy machine may break a reservation, which is no defect."""


@pytest.fixture
def stack(paced: Stack) -> Stack:
    return paced


async def reserve(http: aiohttp.ClientSession, **more: object) -> dict[str, Any]:
    body = {**BODY, "accept": 0.99, **more}
    async with http.post("/v2/quote", json=body) as response:
        quote = await response.json()
        assert response.status == 200, quote
    assert [point["chance"] for point in quote["earliest"]] == [0.5, 0.9, 0.99]
    reservation: dict[str, Any] = quote["reservation"]
    return reservation


async def send(
    http: aiohttp.ClientSession, reservation: dict[str, Any]
) -> tuple[int, str | None, Any]:
    """Status, the chance that the answer says it was reserved with, and the body."""
    headers = reservation["headers"]
    async with http.post("/v1/completions", json=BODY, headers=headers) as response:
        return response.status, response.headers.get("X-Deadline-Reserved"), await response.json()


async def test_a_reservation_is_used_once_and_kept(
    paced: Stack, http: aiohttp.ClientSession
) -> None:
    for _ in range(TRIES):
        reservation = await reserve(http)
        assert reservation["within_ms"] > 200  # ten tokens
        status, reserved, answer = await send(http, reservation)
        if status == 200:
            break
    assert (status, reserved) == (200, "0.99")
    assert answer["usage"]["completion_tokens"] == 10
    kept = paced.orchestrator.metric(
        "tidegate_reservations_ended_total", chance="99", result="kept"
    )
    assert kept >= 1
