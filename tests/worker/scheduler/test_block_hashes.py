import hashlib

from hypothesis import given
from hypothesis import strategies as st

from protocol.blocks import block_hashes, hash_block, root_hash

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_a_name_is_what_the_protocol_says() -> None:
    ids = [1, 2, 3, 2**32 - 1, 5]
    root = hashlib.sha256(b"salt").digest()
    first = hashlib.sha256(root + bytes([1, 0, 0, 0, 2, 0, 0, 0])).digest()
    second = hashlib.sha256(first + bytes([3, 0, 0, 0, 255, 255, 255, 255])).digest()
    assert block_hashes(ids, 2, b"salt") == [first, second]


@given(ids=IDS, more=IDS, block_tokens=st.integers(1, 9))
def test_names_grow_block_by_block(ids: list[int], more: list[int], block_tokens: int) -> None:
    hashes = block_hashes(ids + more, block_tokens, b"s")
    assert hashes[: len(ids) // block_tokens] == block_hashes(ids, block_tokens, b"s")
    parent = root_hash(b"s")
    for i, block_hash in enumerate(hashes):
        parent = hash_block(parent, (ids + more)[i * block_tokens : (i + 1) * block_tokens])
        assert parent == block_hash
