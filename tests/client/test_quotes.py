"""Quotes and reservations, through the client and the command, before a real orchestrator."""

import time
from contextlib import suppress

import pytest

import tidegate
from tests.client.test_commands import ask as ask
from tests.orchestrator.conftest import Service
from tidegate import Client, Quote, QuotedChance


async def test_a_reserved_deadline_goes_with_the_request_that_uses_it(service: Service) -> None:
    async with Client(service.url) as client:
        quote = await client.quote("hi", max_tokens=4, accept=0.99, hold=2000)
        assert quote.stated is None and quote.max_tokens == 4
        assert quote.reservation is not None and quote.reservation.chance == 0.99
        assert quote.reservation.left_s < quote.reservation.within_ms / 1000 + 1
        with suppress(tidegate.DeadlineExceeded):  # where this machine is too slow
            await client.generate("hi", max_tokens=4, reservation=quote.reservation)
            ended = [
                service.metric("tidegate_reservations_ended_total", chance="99", result=result)
                for result in ("kept", "broken")
            ]
            assert sum(ended) == 1
    assert service.metric("tidegate_reservations_total", chance="99") == 1


async def test_an_outline_and_a_deadline_can_be_quoted(service: Service) -> None:
    async with Client(service.url) as client:
        quote = await client.quote(prompt_tokens=300, deadline=60_000)
        assert quote.prompt_tokens == 300
        assert quote.stated is not None and quote.stated.within_ms > 50_000
        with pytest.raises(ValueError, match="prompt_tokens"):
            await client.quote()
        with pytest.raises(tidegate.InvalidRequest, match="accept"):
            await client.quote("hi", accept=0.8)


def test_the_chance_between_two_points_is_on_a_straight_line() -> None:
    points = tuple(
        QuotedChance(chance, ms, round(1000 * time.time() + ms))
        for ms, chance in ((100.0, 0.2), (200.0, 0.6))
    )
    quote = Quote("m", 1, 1, points, None, points, None)
    chances = [quote.chance_by(ms) for ms in (50, 100, 150, 200, 900)]
    assert chances == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.6])
