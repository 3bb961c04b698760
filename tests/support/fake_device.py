"""A device that runs launched steps some time later, on a KV memory that holds texts.

Rows are run with the blocks that they had at the launch. A block that was given to another request
while a launched step could still touch it then holds a text which is not the row's own.
"""

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.engine import EOS, FakeClock
from worker.scheduler.plan import Plan, StepResult
from worker.scheduler.request import PENDING, Request

Text = tuple[object, ...]


class ReadFailed(RuntimeError):
    pass


def next_token(text: Text) -> int:
    """Depends on the whole text; now and then the end of sequence."""
    return EOS + zlib.crc32(repr(text).encode()) % 9


def continuation(prompt: Sequence[int], most: int, *, ignore_eos: bool) -> list[int]:
    """What any engine must answer."""
    text: Text = tuple(prompt)
    answer: list[int] = []
    while len(answer) < most:
        token = next_token(text)
        answer.append(token)
        text += (token,)
        if token == EOS and not ignore_eos:
            break
    return answer


@dataclass
class LaunchedRow:
    request: Request
    slot: int
    blocks: tuple[int, ...]
    start: int
    ids: list[int]
    samples: bool
    text_is_finite: bool = True


class LaunchedFake:
    def __init__(self, device: "FakeDevice", rows: list[LaunchedRow]) -> None:
        self.device = device
        self.rows = rows
        self.ids: list[list[int]] | None = None

    def collect(self) -> StepResult:
        return self.device.collect(self)


class FakeDevice:
    """An ``OverlappingRunner``."""

    def __init__(self, clock: FakeClock, block_tokens: int, step_s: float = 0.0) -> None:
        self.clock = clock
        self.block_tokens = block_tokens
        self.step_s = step_s
        self.cells: dict[tuple[int, int], Text] = {}
        self.last: dict[int, int] = {}
        self.queue: deque[LaunchedFake] = deque()
        self.uncollected: deque[LaunchedFake] = deque()
        self.violations: list[str] = []
        self.launches = 0
        self.most_uncollected = 0
        self.fail_next_launch = False
        self.fail_next_collect = False
        self.closed = False
        self.not_finite: list[int] = []
        """Tokens that make a text's numbers NaN, and those of the texts that read a cell of it."""

    def launch(self, plan: Plan) -> LaunchedFake:
        if self.fail_next_launch:
            self.fail_next_launch = False
            self.run_all()
            raise MemoryError("out of memory")
        rows = []
        for row in plan.rows:
            request = row.request
            ids = request.tokens[row.start : row.start + row.count]
            blocks = tuple(request.blocks)
            rows.append(LaunchedRow(request, request.slot, blocks, row.start, ids, row.samples))
        step = LaunchedFake(self, rows)
        self.queue.append(step)
        self.uncollected.append(step)
        self.launches += 1
        self.most_uncollected = max(self.most_uncollected, len(self.uncollected))
        return step

    def execute(self, plan: Plan) -> StepResult:
        if self.uncollected:
            self.violations.append("a plain step while another one is launched")
        if any(PENDING in row.request.tokens for row in plan.rows):
            self.violations.append("a plain step with a token that nobody knows")
        return self.launch(plan).collect()

    def collect(self, step: LaunchedFake) -> StepResult:
        if self.uncollected.popleft() is not step:
            self.violations.append("steps are collected out of order")
        if self.fail_next_collect:
            self.fail_next_collect = False
            self.run_all()
            self.uncollected.clear()
            raise ReadFailed("once")
        while step.ids is None:
            self.run_one()
        self.clock.now += self.step_s
        broken = [i for i, row in enumerate(step.rows) if not row.text_is_finite]
        return StepResult(
            [[] if i in broken else ids for i, ids in enumerate(step.ids)], not_finite=broken
        )

    def clear(self, blocks: Sequence[int]) -> None:
        """As ``KVMemory`` does."""
        for block in blocks:
            for offset in range(self.block_tokens):
                self.cells.pop((block, offset), None)

    def close(self) -> None:
        self.closed = True

    def run_all(self) -> None:
        while self.queue:
            self.run_one()

    def run_one(self) -> None:
        """Run the oldest step that waits."""
        step = self.queue.popleft()
        step.ids = [self._run(row) for row in step.rows]

    def _run(self, row: LaunchedRow) -> list[int]:
        text = self._read(row, row.start - 1) if row.start else ()
        for position, given in enumerate(row.ids, row.start):
            token = self.last[row.slot] if given == PENDING else given
            text += (token,)
            self.cells[self._cell(row, position)] = text
        row.text_is_finite = not self._spoilt(text)
        is_sound = not self._spoilt(tuple(row.request.tokens))
        for position in range(len(row.blocks) * self.block_tokens):
            if is_sound and self._spoilt(self._read(row, position)):
                self.violations.append(f"slot {row.slot} reads NaN at {position}, none of its own")
        for position in range(len(text)):
            if self._read(row, position) != text[: position + 1]:
                self.violations.append(f"{row} reads at {position} what is not its own")
                break
        if not row.samples:
            return []
        self.last[row.slot] = token = next_token(text)
        return [token]

    def _spoilt(self, text: Text) -> bool:
        return any(token in text for token in self.not_finite)

    def _read(self, row: LaunchedRow, position: int) -> Text:
        return self.cells.get(self._cell(row, position), ("nothing",))

    def _cell(self, row: LaunchedRow, position: int) -> tuple[int, int]:
        return row.blocks[position // self.block_tokens], position % self.block_tokens
