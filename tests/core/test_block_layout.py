"""The pattern equals the 2021 toolkit's, block for block, and leaves numpy's stream alone."""

import re

import numpy as np
import pytest

from bigbird.core import block_layout


def test_random_blocks_equal_the_recorded_ones_bit_for_bit(reference_dir):
    recorded = np.load(reference_dir / "rand_attn.npz")
    assert len(recorded.files) == 12
    for name in recorded.files:
        numbers = re.fullmatch(r"L(\d+)_b(\d+)_r(\d+)_h(\d+)_seed(\d+)", name).groups()
        drawn = block_layout.random_blocks(*map(int, numbers))
        np.testing.assert_array_equal(drawn, recorded[name], err_msg=name)


def test_drawing_leaves_the_global_numpy_stream_untouched():
    np.random.seed(3)
    expected = np.random.random(4)
    np.random.seed(3)
    block_layout.random_blocks(1280, 64, 3, 2, seed=5)
    np.testing.assert_array_equal(np.random.random(4), expected)


@pytest.mark.parametrize("num_blocks", range(1, 17))
@pytest.mark.parametrize("num_rand_blocks", range(5))
def test_every_number_of_blocks_gives_a_pattern_or_an_error_with_the_sizes(
    num_blocks, num_rand_blocks
):
    length = 96 * num_blocks
    try:
        drawn = block_layout.random_blocks(length, 96, num_rand_blocks, 2, seed=0)
    except block_layout.PatternError as error:
        assert f"S={length}" in str(error) and "B=96" in str(error)
        return
    assert drawn.shape == (2, num_blocks - 2, num_rand_blocks)
    assert drawn.size == 0 or (drawn.min() >= 0 and drawn.max() < num_blocks)


def test_blocks_of_a_segmented_pattern_are_never_listed_twice():
    layout = block_layout.model_layout(5120, 64, 3, 2, seed=1)
    assert layout.multiplicity().max() == 1


def test_at_1024_tokens_a_row_may_count_the_last_block_twice_as_in_2021():
    layout = block_layout.model_layout(1024, 64, 3, 8, seed=0)
    counts = layout.multiplicity()
    assert counts[:, 1:-1, -1].max() == 2
    assert counts[:, :, :-1].max() == 1


def test_random_blocks_come_from_the_first_1024_tokens_at_4096():
    assert block_layout.random_blocks(4096, 64, 3, 2, seed=0).max() <= 1024 // 64 - 1


@pytest.mark.parametrize("row", [1, 2, 7, 17, 18])
def test_a_row_sees_global_window_and_random_blocks(row):
    random = block_layout.random_blocks(1280, 64, 3, 1, seed=0)
    layout = block_layout.layout_from_random_blocks(random, 64)
    seen = set(layout.key_blocks[0, row]) - {block_layout.ABSENT}
    assert seen == {0, row - 1, row, row + 1, 19, *random[0, row - 1]}


@pytest.mark.parametrize("length", [128, 512])
def test_2021_models_of_512_tokens_or_fewer_attend_in_full(length):
    assert block_layout.model_layout(length, 16, 3, 2, seed=0) is None


@pytest.mark.parametrize(("length", "sparse"), [(11 * 64, False), (12 * 64, True)])
def test_inputs_of_5_plus_2r_blocks_or_fewer_attend_in_full_in_input_mode(length, sparse):
    layout = block_layout.input_layout(length, 64, 3, 2, seed=0)
    assert (layout is not None) == sparse


def test_too_few_blocks_for_the_random_ones_attend_in_full():
    assert block_layout.model_layout(640, 128, 3, 2, seed=0) is None
