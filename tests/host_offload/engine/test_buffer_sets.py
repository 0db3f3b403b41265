"""How many buffers each kind has, and which kinds share them, for the least memory."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from host_offload.engine.buffer_sets import num_buffers, shared_bytes


def bytes_with(sizes, size, distance, in_place):
    """Return the bytes of all buffers if records up to `size` share."""
    own = num_buffers(distance, 1, in_place) * sum(s for s in sizes if s > size)
    return own + (2 * (distance + 1) * size if size else 0)


@given(st.lists(st.integers(1, 9), max_size=9), st.integers(0, 3), st.booleans())
def test_sharing_takes_the_least_memory(sizes, distance, in_place):
    chosen = shared_bytes(sizes, distance, in_place)
    fewest = min(bytes_with(sizes, size, distance, in_place) for size in (0, *sizes))
    assert bytes_with(sizes, chosen, distance, in_place) == fewest
    assert chosen in (0, *sizes)


def test_many_alike_share_and_a_large_one_keeps_its_own():
    assert shared_bytes([4096] * 24, 1, False) == 4096
    assert shared_bytes([900_000, *[4096] * 24], 1, False) == 4096
    assert shared_bytes([900_000, 4096], 1, False) == 0


def test_of_a_kind_of_many_records_a_few_have_buffers():
    for distance, layers in itertools.product(range(4), (1, 2, 24)):
        assert num_buffers(distance, layers, False) == 2 * min(distance + 1, layers)
        assert num_buffers(distance, layers, True) == min(2 * (distance + 1), layers)
