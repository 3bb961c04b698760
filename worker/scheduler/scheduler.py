"""Plans the requests and tokens of the next step. No tensors, no devices, no clock.

First it fills free slots, least slack first. Then each step spends a token budget: one token for
each decoding request, the rest for chunks of prompts, most urgent first. A request is admitted only
if all blocks that it may need can be reserved, so no request is ever preempted for memory. Only
blocks beyond the cached prefix must be reserved. A paused request gives up its slot but keeps its
blocks::

    waiting ──admit──▶ running ◀──pause, resume──▶ paused     slot: running only
    (held back)          │                          │      blocks: running and paused
                         └────────── release ───────┘
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from worker.scheduler.block_pool import BlockPool
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.end_reason import EndReason
from worker.scheduler.order import most_urgent_first, not_delaying
from worker.scheduler.plan import Plan, Row, Schedule
from worker.scheduler.prefix_cache import PrefixCache
from worker.scheduler.request import PENDING, Request
from worker.scheduler.roster import Roster, queue_order
from worker.scheduler.sessions import KeptSessions


class Scheduler(Roster):
    """The requests of our own engine, with the pool of their blocks. Used by one thread."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        super().__init__(
            capacity_tokens=min(config.context_tokens, pool.total * config.block_tokens),
            context_tokens=config.context_tokens,
            vocab_size=config.vocab_size,
            max_held=config.max_running + config.max_waiting,
            min_start_budget_s=config.min_start_budget_s,
        )
        self.config = config
        self.pool = pool
        self.prefix_cache = PrefixCache(pool, config.block_tokens, enabled=config.prefix_cache)
        self.sessions = KeptSessions(pool)
        self._block_tokens = config.block_tokens
        self._free_slots = list(range(config.max_running - 1, -1, -1))
        self._pinned: Counter[int] = Counter()
        """Pinned blocks and their numbers of pins."""
        self._blocked = False
        """Whether no request can be admitted until one ends or arrives."""
        self._planned_prompts = 0
        """Number of prompt tokens of the last planned step."""

    def enqueue(self, request: Request, now: float) -> EndReason | None:
        refusal = super().enqueue(request, now)
        if refusal is None:
            self._blocked = False
            self.sessions.begin(request)
        return refusal

    def next_prompt_tokens(self, now: float, *, is_more_coming: bool) -> int:
        """Maximum number of prompt tokens in the next step, next to its decodes."""
        if not (
            is_more_coming
            or self.waiting
            or any(len(request.tokens) - request.computed > 1 for request in self.running)
        ):
            return 0
        return self._prompt_budget(len(self.running), self._within_s(self.running, now))

    def schedule(self, now: float = -math.inf) -> Schedule:
        """Plan the next step, and admit as many requests as budget, slots and blocks allow. Without
        ``now`` all requests count as in time."""
        rows: list[Row] = []
        prefilling: list[Request] = []
        for request in self.running:
            if request.leaving or request.pausing:
                continue
            computed = request.computed
            if len(request.tokens) - computed == 1:
                rows.append(Row(request, computed, 1, True))
            else:
                prefilling.append(request)
        decodes = len(rows)
        budget = self._prompt_budget(decodes, self._within_s((row.request for row in rows), now))
        # Admit first, so that a long running prompt does not block an urgent short one.
        started: list[Request] = []
        if budget and self.waiting:
            while not self._blocked and (admitted := self._admit_next()):
                started.append(admitted)
        prefilling += started
        if len(prefilling) > 1:
            prefilling = most_urgent_first(prefilling, self.step_time, now)
        ahead: list[Request] = []
        if prefilling:  # a step that was launched but not read yet may fill blocks of a request
            size = self._block_tokens
            ahead += [r for r in self.running if r.computed >= (r.full_blocks + 1) * size]
        for request in prefilling:
            if not budget:
                break
            budget -= self._add_chunk(rows, request, budget, ahead)
        if not rows:
            return Schedule(None, started)
        self._planned_prompts = sum(row.count for row in rows[decodes:])
        tokens = decodes + self._planned_prompts
        return Schedule(Plan(rows, decodes, tokens), started)

    def advance(self, row: Row, new_ids: list[int]) -> None:
        """Record a step's result. All but the last new token are already in the pool."""
        request = row.request
        computed = row.start + row.count
        if new_ids:
            request.tokens += new_ids
            new = len(new_ids)
            computed += new - 1
            if request.least_tokens:
                request.least_tokens = max(0, request.least_tokens - new)
        request.computed = computed
        if computed >= (request.full_blocks + 1) * self._block_tokens:
            self.prefix_cache.register_full_blocks(request, computed)

    def launch(self, row: Row) -> None:
        """Record a launched row before its result is known: its new token is ``PENDING``."""
        request = row.request
        request.computed = row.start + row.count
        if row.samples:
            request.tokens.append(PENDING)
            request.leaving = len(request.tokens) >= request.limit_tokens

    def confirm(self, row: Row, new_ids: list[int]) -> None:
        """Record the result of a launched row, at most one token."""
        request = row.request
        end = row.start + row.count
        if new_ids:
            (request.tokens[end],) = new_ids
            if request.least_tokens:
                request.least_tokens -= 1
        if end >= (request.full_blocks + 1) * self._block_tokens:
            self.prefix_cache.register_full_blocks(request, end)

    def discard(self, row: Row) -> None:
        """Drop a launched row's token and all later ones; its request gets no further steps."""
        request = row.request
        request.leaving = True
        del request.tokens[max(row.start + row.count, request.prompt_tokens) :]

    def spoil(self, request: Request) -> None:
        """Mark a request's results as unusable: its blocks are never found or read again."""
        request.spoilt = True
        self.pool.spoil(request.blocks)

    def undo_launch(self, row: Row) -> None:
        """Undo ``launch``, so that the row is planned again. Undo later rows first."""
        request = row.request
        request.computed = row.start
        request.leaving = False
        request.revision += 1
        del request.tokens[max(row.start + row.count, request.prompt_tokens) :]

    def release(self, request: Request) -> None:
        """Remove a request in any state; its slot and blocks are free when this returns."""
        self._blocked = False
        if request.paused:
            self.paused.remove(request)
            request.paused = False
        elif request.slot >= 0:
            self._leave_slot(request)
        else:
            self.waiting.remove(request)
            return
        self.pool.free(request.blocks)
        request.blocks = []

    def pause(self, request: Request) -> None:
        """Remove a running request from its slot. No launched step may have a row of it."""
        self._blocked = False
        self._leave_slot(request)
        request.pausing = False
        request.paused = True
        self.paused.append(request)

    def resume(self, request: Request) -> bool:
        """Give a paused request a slot, not necessarily the same; False if none is free."""
        if not self._free_slots:
            return False
        self.paused.remove(request)
        request.paused = False
        request.slot = self._free_slots.pop()
        self.running.append(request)
        return True

    def pin(self, blocks: Sequence[int]) -> None:
        """Keep blocks with a hash unchanged until ``unpin``."""
        self.pool.share(blocks)
        self._pinned.update(blocks)

    def reserve_blocks(self, count: int) -> list[int]:
        """Allocate blocks that another component fills, until ``unpin``. Enough must be free."""
        blocks = self.pool.allocate(count)
        self._pinned.update(blocks)
        return blocks

    def unpin(self, blocks: Sequence[int], *, as_oldest: bool = False) -> None:
        """Release pinned or reserved blocks for use and eviction (see ``BlockPool.free``)."""
        self._pinned.subtract(blocks)
        self._pinned = +self._pinned
        self.pool.free(blocks, as_oldest=as_oldest)
        self.unblock()

    def unblock(self) -> None:
        self._blocked = False

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if slots, blocks and requests are inconsistent."""
        self.pool.check_integrity()
        holders = self.running + self.paused
        own = [block for request in holders for block in request.blocks[request.full_blocks :]]
        full = {block for request in holders for block in request.blocks[: request.full_blocks]}
        assert len(own) == len(set(own)), "two requests write the same block"
        assert not full & set(own), "a shared block is written"
        assert not self._pinned.keys() & set(own), "a pinned block is written"
        held = len(full | self._pinned.keys()) + len(own)
        assert held == self.pool.used_count, "blocks are used without a holder"
        slots = self._free_slots + [request.slot for request in self.running]
        assert sorted(slots) == list(range(self.config.max_running)), "a slot was lost or shared"
        for request in holders:
            assert len(request.blocks) == self.config.blocks_for(request.limit_tokens)
            assert request.leaving or request.computed < len(request.tokens)
            assert len(request.tokens) <= request.limit_tokens
            assert request.full_blocks * self.config.block_tokens <= request.computed
        for request in self.paused:
            assert request.paused and request.slot == -1, "a paused request has a slot"
            assert PENDING not in request.tokens[request.prompt_tokens :]
        for request in self.waiting:
            assert not request.paused, "a paused request waits"
            assert request.slot == -1 and not request.blocks, "a waiting request holds something"
        assert self.waiting == sorted(self.waiting, key=queue_order), "the queue lost its order"

    def _within_s(self, requests: Iterable[Request], now: float) -> float:
        """Seconds until the first next token of the ``requests`` with a stated gap is due (DL-14);
        infinite if there are none.

        A stated gap defines a schedule: an early first token leaves time that prompts may use
        (QoServe's dynamic chunks, arXiv 2503.22562). A row without such time gets a token per gap.
        """
        paced = [one for one in requests if one.job.token_gap_s < math.inf]
        if not paced:
            return math.inf
        step_time = self.step_time
        slow_s = step_time.slow_step_s(0) - step_time.plain_step_s
        ahead_s = step_time.slow_step_s(self._planned_prompts)  # of the unfinished step
        least_s = math.inf
        for request in paced:
            job, within_s = request.job, request.job.token_gap_s
            start = job.first_token_by if job.first_token_by < math.inf else request.first_token_at
            if start is not None:
                late_s = slow_s + ahead_s if request.tokens[-1] == PENDING else slow_s
                within_s = max(within_s, start + request.generated * within_s - now - late_s)
            least_s = min(least_s, within_s)
        return least_s

    def _prompt_budget(self, decodes: int, gap_s: float) -> int:
        """Maximum number of prompt tokens of the next step. They may delay its decodes by
        ``max_stall_s``, or by the time of a step without prompts if that is longer: otherwise
        prompts would starve. ``gap_s`` is the shortest time within which a decode needs its next
        token (``_within_s``): a step must not take longer.

        A partial tile of tokens costs as much as a full one: a tile that is at least half full is
        filled unless ``gap_s`` forbids it; any other partial tile is dropped.
        """
        budget = self.config.max_step_tokens - decodes
        if not decodes:
            return budget
        plain_s = self.step_time.plain_step_s
        usual_s, most_s = max(self.config.max_stall_s, plain_s), gap_s - plain_s
        stall_s = max(0.0, min(usual_s, most_s))
        allowed = self.step_time.prompt_tokens_within(stall_s, budget)
        tile = self.config.tile_tokens
        begun = (decodes + allowed) % tile
        is_filled = 2 * begun >= tile and usual_s <= most_s
        allowed += tile - begun if is_filled else -begun
        # At least one block, so that prompts make progress even if steps are slow.
        return min(budget, max(allowed, self.config.block_tokens))

    def _add_chunk(
        self, rows: list[Row], request: Request, budget: int, ahead: list[Request]
    ) -> int:
        """Give ``request`` a row, unless one ``ahead`` computes its prefix. Returns its tokens."""
        if not request.begun:
            if self.prefix_cache.adopt(request):
                self.unblock()
            if self.prefix_cache.is_computed_by(ahead, request):
                return 0
            request.begun = True
        ahead.append(request)
        left = len(request.tokens) - request.computed
        count = min(left, budget)
        rows.append(Row(request, request.computed, count, count == left))
        return count

    # ── admission ────────────────────────────────────────────────────────────────────────────

    def _admit_next(self) -> Request | None:
        """Admit the head of the queue if its blocks are free, or else one that does not delay it.
        None if no request can be admitted, until one ends or arrives."""
        # Those that wait only for a slot and blocks, least slack first.
        ready = [r for r in self.waiting if not (r.loading or r.held_back or r.compiling)]
        if ready and self._free_slots:
            head, *others = ready
            if self._reserve(head):
                return head
            # The number of smaller requests that overtake one without blocks is limited.
            if head.backfilled_past < 2 * self.config.max_running:
                holders = self.running + self.paused
                for request in not_delaying(
                    head, others, holders, self.pool.free_count, self.config
                ):
                    if self._reserve(request):
                        head.backfilled_past += 1
                        return request
        self._blocked = True
        return None

    def _reserve(self, request: Request) -> bool:
        """Move a waiting request to the running ones if all of its blocks are available."""
        if not self.prefix_cache.reserve(request, self.config.blocks_for(request.limit_tokens)):
            return False
        self.waiting.remove(request)
        request.slot = self._free_slots.pop()
        self.running.append(request)
        return True

    def _leave_slot(self, request: Request) -> None:
        self.running.remove(request)
        self._free_slots.append(request.slot)
        request.slot = -1
