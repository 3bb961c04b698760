"""Fields that were appended: neither side needs the other to know them."""

import msgspec

from worker.protocol import TokenLogprob


class _Before(msgspec.Struct, array_like=True, frozen=True):
    logprob: float
    top: list[tuple[int, float]] = []


def test_a_rank_may_be_missing_or_unknown() -> None:
    now, before = TokenLogprob(-1.5, [(3, -0.5)], 9), _Before(-1.5, [(3, -0.5)])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(now), type=_Before) == before
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(before), type=TokenLogprob)
    assert read == TokenLogprob(-1.5, [(3, -0.5)], 0)
