"""What chaos is made of: lanes that can be shut, and what a round may cost."""

import asyncio
import random
from collections import Counter
from contextlib import suppress

from perf.chaos.__main__ import Allowed, plan_of
from perf.chaos.checks import judge_rounds
from perf.chaos.clients import Ledger
from perf.chaos.gates import Gate
from worker.runner.simulated_device import DeviceFault


async def test_a_gate_breaks_what_is_open_and_lets_nobody_through_until_it_opens() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while line := await reader.readline():
                writer.write(line)
        writer.close()

    async def come() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = gate.addresses[0].rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"hello\n")
        return await reader.readline()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server, Gate([f"127.0.0.1:{server.sockets[0].getsockname()[1]}"]) as gate:
        passing = await come()
        assert await say(*passing) == b"hello\n"
        gate.shut()
        assert await passing[0].read() == b""
        reader, writer = await come()
        assert await reader.read() == b""
        gate.open()
        again = await come()
        assert await say(*again) == b"hello\n"
        for _, each in (passing, (reader, writer), again):
            each.close()


async def test_a_gate_to_nobody_closes() -> None:
    async with Gate(["127.0.0.1:9"]) as gate:
        host, _, port = gate.addresses[0].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await reader.read() == b""
        writer.close()


def test_what_a_death_has_broken_may_come_to_light_one_round_later_and_no_more() -> None:
    ledger = Ledger(
        outcomes={
            "1 kill": Counter({("plain", "broken"): 2, ("durable", "met"): 3}),
            "2 pause": Counter({("plain", "broken"): 1, ("plain", "instance_lost"): 1}),
            "3 pause": Counter({("plain", "broken"): 1}),
        }
    )
    dies, nobody = frozenset({"broken", "gone"}), frozenset[str]()
    judge_rounds(ledger, [("1 kill", dies), ("2 pause", nobody), ("3 pause", nobody)])
    assert ledger.faults == [
        "2 pause: 1 plain requests came to instance_lost",
        "3 pause: 1 plain requests came to broken",
    ]


def test_a_device_dies_in_every_way_where_it_is_a_simulated_one() -> None:
    can = Allowed(has_network=False, disks={}, skipped=[])
    paced, torch = (
        {fault.name for fault in plan_of(random.Random(1), "the device under worker 1", can, name)}
        for name in ("synthetic-paced", "torch")
    )
    assert len(paced) == len(DeviceFault) and not torch
