"""A Triton with the slot model, on free loopback ports."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from catalog.paths import state_dir
from perf.stack.stack import triton
from pool.engines.triton import find_triton
from pool.units.triton import TritonInstance

MODEL = "slot"


@dataclass(frozen=True, slots=True)
class ClipSpec:
    """Settings of the slot model (``TIDEGATE_SLOT__…``)."""

    device: str = "cpu"
    size: int = 128
    """Most pixels of either side."""
    seconds: float = 6.0
    """Greatest length of a clip, in seconds."""
    slots: int = 2
    buffer_s: float = 0.3
    constants: Mapping[str, object] = field(default_factory=dict)
    """Constants of the model (``perf.stack.constants``)."""
    more: Mapping[str, str] = field(default_factory=dict)
    """Further variables of the environment, by their whole names."""

    def env(self) -> dict[str, str]:
        stated = {
            "DEVICE": self.device,
            "SIZE": self.size,
            "SECONDS": self.seconds,
            "SLOTS": self.slots,
            "BUFFER_S": self.buffer_s,
        }
        return {f"TIDEGATE_SLOT__{name}": str(value) for name, value in stated.items()} | dict(
            self.more
        )


class _Described(msgspec.Struct):
    pid: int


@dataclass(frozen=True, slots=True)
class ClipServer:
    """A Triton that serves clips."""

    instance: TritonInstance
    triton_version: str

    @property
    def grpc_address(self) -> str:
        return self.instance.grpc_address

    @property
    def pid(self) -> int:
        """Process id of Triton's server; the worker's processes are below it."""
        return msgspec.convert(self.instance.describe(), _Described).pid


@asynccontextmanager
async def serving(spec: ClipSpec, name: str = "slot") -> AsyncIterator[ClipServer]:
    """Run a Triton with the slot model during the body. Raises ``ProvisionError``."""
    async with triton(name, MODEL, spec.env(), constants=spec.constants) as instance:
        yield ClipServer(instance, find_triton(None, state_dir()).version)
