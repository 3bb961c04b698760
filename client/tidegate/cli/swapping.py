"""``tidegate swap``: what it does and prints."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from tidegate.cli.terminal import print_json
from tidegate.client import Client
from tidegate.listings import SwapState


@dataclass(frozen=True, slots=True)
class Asked:
    """Target of a swap; with ``grace_s`` None, work that runs has until its last deadline."""

    model: str
    name: str
    settings: Mapping[str, str]
    grace_s: float | None
    back: bool

    @property
    def grace(self) -> timedelta | None:
        return None if self.grace_s is None else timedelta(seconds=self.grace_s)


async def swap(client: Client, address: str, asked: Asked, *, as_json: bool) -> int:
    """Swap one instance's model; returns once it is ready."""
    state = await client.operating.swap(
        address,
        asked.model,
        name=asked.name,
        settings=asked.settings,
        grace=asked.grace,
        back=asked.back,
    )
    if as_json:
        print_json(state)
    else:
        print(_line(state))
    return 0


async def swap_all(client: Client, asked: Asked, *, as_json: bool) -> int:
    """Swap the model of all instances, one after the other."""
    done = await client.operating.swap_all(
        asked.model,
        name=asked.name,
        settings=asked.settings,
        grace=asked.grace,
        on_swap=(lambda state: None) if as_json else lambda state: print(_line(state), flush=True),
    )
    if as_json:
        print_json(done)
    return 0


def _line(state: SwapState) -> str:
    if not state.ms:
        return f"{state.address} serves {state.model} already"
    phases = ", ".join(f"{phase} {ms:.0f} ms" for phase, ms in state.ms.items())
    return f"{state.address} serves {state.model} after {state.total_ms / 1000:.2f} s ({phases})"
