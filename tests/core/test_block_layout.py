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


def _layout(length=2048, num_rand_blocks=3, **options):
    return block_layout.model_layout(
        length, 64, num_rand_blocks, 2, 0, block_layout.PatternOptions(**options)
    )


def _seen(layout, row):
    return set(layout.key_blocks[0, row]) - {block_layout.ABSENT}


def test_a_wider_window_sees_more_blocks_on_either_side():
    assert _seen(_layout(num_rand_blocks=0, num_window_blocks=5), 7) == {0, 5, 6, 7, 8, 9, 31}
    assert _seen(_layout(num_rand_blocks=0, num_window_blocks=1), 7) == {0, 7, 31}


def test_more_global_blocks_and_the_blocks_of_global_tokens_see_everything():
    layout = _layout(num_rand_blocks=0, num_global_blocks=2, global_token_positions=(640, 650))
    assert list(layout.global_blocks) == [0, 1, 10, 30, 31]
    counts = layout.multiplicity()
    assert (counts[:, layout.global_blocks] == 1).all()
    assert (counts[:, :, layout.global_blocks] == 1).all()


def test_unseen_random_blocks_are_never_counted_twice():
    assert _layout(num_window_blocks=9).multiplicity().max() == 2
    layout = _layout(num_window_blocks=9, unseen_random_blocks=True)
    assert layout.multiplicity().max() == 1
    assert layout.key_blocks[:, 20].max() == 31  # the last block, for it is global
    assert np.sort(layout.key_blocks[0, 25])[-12] < 1024 // 64


def test_random_blocks_may_come_from_the_whole_sequence():
    random = _layout(random_from_whole_sequence=True).key_blocks[:, 1:-1, -3:]
    assert random.max() > 1024 // 64
    assert _layout().key_blocks[:, 1:-1, -3:].max() <= 1024 // 64 - 1


def test_rows_with_too_few_unseen_blocks_take_those_there_are():
    layout = _layout(length=576, num_rand_blocks=8, random_from_whole_sequence=True)
    assert (layout.multiplicity() == 1).all()


def test_the_seed_changes_the_random_blocks():
    assert (_layout().key_blocks != _layout(seed=1).key_blocks).any()


def test_the_default_options_are_the_pattern_of_2021():
    plain = block_layout.model_layout(2048, 64, 3, 2, seed=0)
    np.testing.assert_array_equal(_layout().key_blocks, plain.key_blocks)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_window_blocks": 4}, "num_window_blocks=4: expected an odd number"),
        ({"num_global_blocks": 0}, "num_global_blocks=0: expected at least 1"),
        ({"seed": -1}, "pattern_seed=-1"),
    ],
)
def test_options_outside_their_ranges_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        block_layout.PatternOptions(**options)


def test_a_global_token_outside_the_sequence_is_refused():
    options = block_layout.PatternOptions(global_token_positions=(512,))
    with pytest.raises(ValueError, match="holds 512: expected positions from 0 to 511"):
        options.check(512)
