"""The tiles of a pattern and of its transpose hold every pair of blocks, once each."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.attention_oracle import pattern

from bigbird.core.block_layout import ABSENT, BlockLayout, layout_from_random_blocks, model_layout
from bigbird.core.block_tiles import tile_tables


def _counts(table, num_blocks, *, transposed):
    """How often an input of `num_blocks` blocks pairs blocks, by its tiles: `[H, n, n]`."""
    first, used = table.first[:, :num_blocks], slice(0, table.extra_count[num_blocks])
    heads, blocks = np.indices(first.shape[:2]).reshape(2, -1)
    counts = np.zeros([len(first), num_blocks, num_blocks], int)
    for head, block, listed in zip(
        [*heads, *table.extra_head[used]],
        [*blocks, *table.extra_block[used]],
        [*first.reshape(-1, first.shape[-1]), *table.extra[used]],
        strict=True,
    ):
        for other in listed[(listed != ABSENT) & (listed < num_blocks)]:
            query, key = (other, block) if transposed else (block, other)
            counts[head, query, key] += 1
    return counts


@settings(max_examples=30)
@given(st.data())
def test_both_tables_hold_the_pattern_at_every_length(data):
    num_blocks = data.draw(st.integers(4, 12))
    num_random, num_heads = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    random = rng.integers(ABSENT, num_blocks, [num_heads, num_blocks - 2, num_random])
    layout = layout_from_random_blocks(random, block_size=1)
    length = data.draw(st.integers(1, num_blocks))

    expected = pattern(layout, length)
    query_tiles, key_tiles = tile_tables(layout)
    np.testing.assert_array_equal(_counts(query_tiles, length, transposed=False), expected)
    np.testing.assert_array_equal(_counts(key_tiles, length, transposed=True), expected)


@pytest.mark.parametrize("length", [1024, 4096, 16384])
def test_few_places_of_the_tiles_are_unused(length):
    for table in tile_tables(model_layout(length, 64, 3, 12, seed=0)):
        used = np.sum(table.first != ABSENT) + np.sum(table.extra != ABSENT)
        assert used > 0.75 * (table.first.size + table.extra.size)


def test_a_short_input_needs_few_extra_tiles():
    for table in tile_tables(model_layout(16384, 64, 3, 1, seed=0)):
        assert table.extra_count[16] <= 5 * 16
        assert table.extra_count[-1] == len(table.extra)


def test_a_block_that_lists_nothing_has_an_empty_tile():
    key_blocks = np.full([1, 4, 1], ABSENT, np.int32)
    key_blocks[0, 1, 0] = 2
    query_tiles, _ = tile_tables(BlockLayout(16, key_blocks, np.array([0, 3])))
    assert np.all(query_tiles.first[0, 2] == ABSENT)
    np.testing.assert_array_equal(query_tiles.first[0, 1, 0], 2)
