"""Context of every benchmark: its stack, and its time limit."""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from perf.load.lane import open_lane
from perf.report.bundle import Figure
from perf.stack.stack import Stack, StackSpec, running
from protocol import ModelCard


class BenchContext(AsyncExitStack):
    """Starts a stack when a benchmark asks for one, and keeps it while the next wants the same."""

    def __init__(self, *, quick: bool, device: str) -> None:
        super().__init__()
        self.quick = quick
        self.device = device
        self.card: ModelCard | None = None
        """Card of the first real model that was served."""
        self.triton_version = ""
        self._spec: StackSpec | None = None
        self._stack: Stack | None = None

    async def stack(self, spec: StackSpec) -> Stack:
        """Stack of the kind ``spec``; the one that ran before is ended if it is another kind."""
        if self._stack is not None and spec == self._spec:
            return self._stack
        self._stack = None
        await self.aclose()
        self._spec = spec
        self._stack = await self.enter_async_context(running(spec))
        self.triton_version = self._stack.triton_version
        if self.card is None or spec.engine == "torch":
            async with open_lane(self._stack.grpc_address) as lane:
                self.card = lane.card
        return self._stack


@dataclass(frozen=True, slots=True)
class Bench:
    """One benchmark. ``limit_s`` bounds it, the start of its stack included."""

    name: str
    what: str
    run: Callable[[BenchContext], Awaitable[list[Figure]]]
    limit_s: float
    in_quick: bool = field(default=True)
    is_promise: bool = field(default=False)
    """Whether it fails unless its counts are as promised: the gate runs it, with no recorded run to
    compare with."""
