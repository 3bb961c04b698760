"""Lets requests share blocks that another request has computed or is computing."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from math import ceil

from protocol.blocks import block_hashes, hash_block, root_hash
from worker.scheduler.block_pool import BlockPool
from worker.scheduler.request import Request


class PrefixCache:
    """The prefix cache for requests. Used by the scheduler on the engine's thread."""

    def __init__(self, pool: BlockPool, block_tokens: int, *, enabled: bool) -> None:
        self.enabled = enabled
        self.hit_blocks_total = 0
        self.missed_blocks_total = 0
        self._pool = pool
        self._block_tokens = block_tokens

    @property
    def cached_tokens_total(self) -> int:
        """Number of prompt tokens that did not have to be computed."""
        return self.hit_blocks_total * self._block_tokens

    def hash_prompt(self, request: Request, salt: bytes) -> None:
        """Hash the prompt's blocks. For the submitter's thread: long prompts take milliseconds."""
        if not self.enabled:
            return
        request.root_hash = root_hash(salt)
        # Ids that overflow are not token ids: the scheduler refuses the request.
        with suppress(OverflowError):
            request.hashes = block_hashes(request.tokens, self._block_tokens, salt)

    def shareable_blocks(self, request: Request) -> int:
        """Number of the prompt's full blocks, except one that would leave no token to compute; 0 if
        prompt log-probabilities are requested, which the cache does not have."""
        if request.job.sampling.prompt_logprobs is not None:
            return 0
        return min(len(request.hashes), (request.prompt_tokens - 1) // self._block_tokens)

    def reserve(self, request: Request, blocks: int) -> bool:
        """Give ``request`` this many blocks, its cached prefix included; False if too few."""
        shareable = self.shareable_blocks(request)
        shared = self._pool.match(islice(request.hashes, shareable))
        if not self._pool.fits(shared, blocks - len(shared)):
            return False
        self._pool.share(shared)
        request.blocks = shared + self._pool.allocate(blocks - len(shared))
        self.missed_blocks_total += shareable - len(shared)
        self._skip(request, len(shared))
        return True

    def adopt(self, request: Request) -> bool:
        """Replace reserved blocks of a request that has not begun with equal ones that were
        computed meanwhile. True if there were any, so that reserved ones are free again."""
        first, end = request.full_blocks, self.shareable_blocks(request)
        found = self._pool.match(islice(request.hashes, first, end))
        if found:
            self._pool.share(found)
            self._pool.free(request.blocks[first : first + len(found)])
            request.blocks[first : first + len(found)] = found
            self.missed_blocks_total -= len(found)
            self._skip(request, len(found))
        return bool(found)

    def is_computed_by(self, others: Sequence[Request], request: Request) -> bool:
        """Whether one of ``others`` will compute most of the blocks that ``request`` needs: less
        than half is not worth a wait of a step or more."""
        first, end = request.full_blocks, self.shareable_blocks(request)
        enough = (request.prompt_tokens - request.computed) / (2 * self._block_tokens)
        if end - first < enough:
            return False
        last = first + max(1, ceil(enough)) - 1
        # Hashes are chained: if one is equal, all before it are equal.
        block_hash = request.hashes[last]
        return any(
            last < len(other.hashes) and other.hashes[last] == block_hash for other in others
        )

    def register_full_blocks(self, request: Request, computed: int) -> None:
        """Register the blocks that ``computed`` tokens fill, so that others can share them."""
        if not self.enabled:
            return
        tokens, size, hashes = request.tokens, self._block_tokens, request.hashes
        for index in range(request.full_blocks, computed // size):
            if index == len(hashes):
                parent = hashes[-1] if hashes else request.root_hash
                hashes.append(hash_block(parent, tokens[index * size : (index + 1) * size]))
            self._pool.register(request.blocks[index], hashes[index])
            request.full_blocks = index + 1

    def _skip(self, request: Request, blocks: int) -> None:
        self.hit_blocks_total += blocks
        request.full_blocks += blocks
        request.computed += blocks * self._block_tokens
        request.cached_tokens += blocks * self._block_tokens
