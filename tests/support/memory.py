"""A KV memory that holds, instead of numbers, what the numbers would depend on."""

from worker.scheduler.block_pool import BlockPool
from worker.scheduler.plan import Plan, Row


class FakeMemory:
    """Per block and offset: salt and all tokens up to there, as KV depends on every one of them."""

    def __init__(self, pool: BlockPool, block_tokens: int) -> None:
        self.pool = pool
        self.block_tokens = block_tokens
        self.cells: list[list[object]] = [[None] * block_tokens for _ in range(pool.total)]

    def compute(self, plan: Plan) -> None:
        """Write what each row computes, then read all that it attends to."""
        for row in plan.rows:
            self._write(row)
        for row in plan.rows:
            self._read(row)

    def _write(self, row: Row) -> None:
        request = row.request
        for position in range(row.start, row.start + row.count):
            block = request.blocks[position // self.block_tokens]
            assert self.pool._hashes[block] is None, "a named block is written"
            assert self.pool._references[block] == 1, "a shared block is written"
            self.cells[block][position % self.block_tokens] = self.content(row, position)

    def _read(self, row: Row) -> None:
        request = row.request
        for position in range(row.start + row.count):
            block = request.blocks[position // self.block_tokens]
            found = self.cells[block][position % self.block_tokens]
            assert found == self.content(row, position), f"position {position} is not its own"

    @staticmethod
    def content(row: Row, position: int) -> tuple[str, tuple[int, ...]]:
        request = row.request
        return request.job.cache_salt, tuple(request.tokens[: position + 1])
