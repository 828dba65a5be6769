"""Which key blocks a query block sees: the BigBird pattern as numpy tables, drawn once at build.

Axis letters: H heads, L tokens, N blocks, S tokens in a block, R random blocks, G global blocks,
K key blocks that one row lists.

The pattern (Zaheer et al., arXiv:2007.14062, section 2 and appendix D): the first and last
block see everything and are seen by all; every other block row sees its own block, the two
beside it, and R random ones. Random blocks are drawn as the 2021 toolkit drew them, number for
number, so that its checkpoints keep the pattern they were trained with. `PatternOptions` changes
each part of it.
"""

from __future__ import annotations

import dataclasses

import numpy as np

# The lengths for which the 2021 toolkit drew random blocks from the first 1,024 tokens only.
FIRST_TOKENS_LENGTHS = (1024, 2048, 3072, 4096)
# Hugging Face's version leaves out 2,048.
FIRST_TOKENS_LENGTHS_HF = (1024, 3072, 4096)
RANDOM_BLOCKS_END = 1024
BUILT_FOR_LENGTH = 4096
# At this length or below, 2021 models attended in full.
FULL_ATTENTION_LENGTH = 512
# Row i sees at most block 0, its three window blocks and block N-1, besides the random ones.
FIXED_BLOCKS = 5
ABSENT = -1


@dataclasses.dataclass(frozen=True)
class PatternOptions:
    """What a pattern may have beyond that of 2021, which is the default.

    Attributes:
      num_window_blocks: odd; a row sees its own block and as many on either side.
      num_global_blocks: blocks at either end that see everything and are seen by all.
      global_token_positions: tokens whose blocks are global too.
      random_from_whole_sequence: draws random blocks from the whole sequence at every length; all
        are then unseen ones.
      unseen_random_blocks: draws random blocks that the row does not see for another reason; fewer
        where there are fewer.
      seed: added to the seed of a layer, its index.

    Raises:
      ValueError: for a value outside its range.
    """

    num_window_blocks: int = 3
    num_global_blocks: int = 1
    global_token_positions: tuple[int, ...] = ()
    random_from_whole_sequence: bool = False
    unseen_random_blocks: bool = False
    seed: int = 0

    def __post_init__(self):
        if self.num_window_blocks < 1 or self.num_window_blocks % 2 == 0:
            raise ValueError(
                f"num_window_blocks={self.num_window_blocks}: expected an odd number of at least "
                "1, a row's own block and as many on either side."
            )
        if self.num_global_blocks < 1:
            raise ValueError(f"num_global_blocks={self.num_global_blocks}: expected at least 1.")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"pattern_seed={self.seed}: expected a number in [0, 2**31).")

    def check(self, length: int) -> None:
        """Checks the positions against the length of the sequence.

        Raises:
          ValueError: for a position outside it.
        """
        for position in self.global_token_positions:
            if not 0 <= position < length:
                raise ValueError(
                    f"global_token_positions holds {position}: expected positions from 0 to "
                    f"{length - 1}, inside --max_encoder_length={length}."
                )

    def global_blocks(self, num_blocks: int, block_size: int) -> list[int]:
        """Returns the global blocks among `num_blocks`, ascending."""
        ends = range(min(self.num_global_blocks, num_blocks))
        blocks = {*ends, *(num_blocks - 1 - block for block in ends)}
        blocks.update(position // block_size for position in self.global_token_positions)
        return sorted(block for block in blocks if block < num_blocks)

    def window(self, row: int, num_blocks: int) -> range:
        """Returns the blocks of the window of a row."""
        side = self.num_window_blocks // 2
        return range(max(row - side, 0), min(row + side + 1, num_blocks))


BIGBIRD_2021 = PatternOptions()


class PatternError(ValueError):
    """A length with too few blocks for the pattern asked of it."""


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """The key blocks of every query block.

    Attributes:
      block_size: S, tokens in a block.
      key_blocks: int32 `[H, N, K]`, ids of the key blocks of each row; `ABSENT` fills unused
        places. A block listed twice counts twice. The rows of global blocks, which see
        everything, are left `ABSENT` here.
      global_blocks: int32 `[G]`, ascending; 0 and N-1 are among them.
    """

    block_size: int
    key_blocks: np.ndarray
    global_blocks: np.ndarray

    @property
    def num_blocks(self) -> int:
        return self.key_blocks.shape[1]

    def multiplicity(self) -> np.ndarray:
        """How often each query block counts each key block: int32 `[H, N, N]`."""
        num_heads, num_blocks, _ = self.key_blocks.shape
        counts = np.zeros((num_heads, num_blocks, num_blocks), np.int32)
        head, row, slot = np.nonzero(self.key_blocks != ABSENT)
        np.add.at(counts, (head, row, self.key_blocks[head, row, slot]), 1)
        counts[:, self.global_blocks] = 1
        return counts


def model_layout(
    length: int,
    block_size: int,
    num_rand_blocks: int,
    num_heads: int,
    seed: int,
    options: PatternOptions = BIGBIRD_2021,
):
    """The pattern of a 2021 model built for `length` tokens, or of one with other options.

    Returns:
      A `BlockLayout`, or None where the model attends in full: at 512 tokens or fewer, and
      where there are too few blocks to draw from.
    """
    if length <= FULL_ATTENTION_LENGTH:
        return None
    return _layout_or_none(length, block_size, num_rand_blocks, num_heads, seed, options)


def input_layout(
    length: int,
    block_size: int,
    num_rand_blocks: int,
    num_heads: int,
    seed: int,
    built_for: int = BUILT_FOR_LENGTH,
    options: PatternOptions = BIGBIRD_2021,
):
    """The pattern of an input of `length` tokens, as Hugging Face's version chooses it.

    `built_for` is the model's `max_position_embeddings`.

    Returns:
      A `BlockLayout`, or None where the input is attended in full.
    """
    if length <= (FIXED_BLOCKS + 2 * num_rand_blocks) * block_size:
        return None
    return _layout_or_none(
        length,
        block_size,
        num_rand_blocks,
        num_heads,
        seed,
        options,
        first_tokens_lengths=FIRST_TOKENS_LENGTHS_HF,
        built_for=built_for,
    )


def _layout_or_none(
    length,
    block_size,
    num_rand_blocks,
    num_heads,
    seed,
    options,
    first_tokens_lengths=FIRST_TOKENS_LENGTHS,
    built_for=BUILT_FOR_LENGTH,
):
    seed += options.seed
    try:
        if options.random_from_whole_sequence or options.unseen_random_blocks:
            num_blocks = _count_blocks(length, block_size)
            early = length in first_tokens_lengths and not options.random_from_whole_sequence
            end = RANDOM_BLOCKS_END // block_size if early else num_blocks
            random = unseen_blocks(
                num_blocks, end, block_size, num_rand_blocks, num_heads, seed, options
            )
        else:
            random = random_blocks(
                length,
                block_size,
                num_rand_blocks,
                num_heads,
                seed,
                first_tokens_lengths,
                built_for,
            )
    except PatternError:
        return None
    return layout_from_random_blocks(random, block_size, options)


def layout_from_random_blocks(
    random: np.ndarray, block_size: int, options: PatternOptions = BIGBIRD_2021
) -> BlockLayout:
    """Adds global and window blocks to random ones `[H, N-2, R]`."""
    num_heads, num_middle, num_random = random.shape
    num_blocks = num_middle + 2
    global_blocks = options.global_blocks(num_blocks, block_size)
    num_fixed = len(global_blocks) + options.num_window_blocks
    key_blocks = np.full((num_heads, num_blocks, num_fixed + num_random), ABSENT, np.int32)
    for row in range(1, num_blocks - 1):
        fixed = sorted({*global_blocks, *options.window(row, num_blocks)})
        key_blocks[:, row, : len(fixed)] = fixed
    key_blocks[:, 1:-1, num_fixed:] = random
    key_blocks[:, global_blocks] = ABSENT
    return BlockLayout(block_size, key_blocks, np.array(global_blocks, np.int32))


def unseen_blocks(
    num_blocks: int,
    end: int,
    block_size: int,
    num_rand_blocks: int,
    num_heads: int,
    seed: int,
    options: PatternOptions,
) -> np.ndarray:
    """Draws random blocks below `end` that a row sees for no other reason.

    Returns:
      int32 `[H, N-2, R]`; `ABSENT` fills the rows that have fewer than R to draw from.
    """
    generator = np.random.RandomState(seed)
    global_blocks = options.global_blocks(num_blocks, block_size)
    drawn = np.full((num_heads, num_blocks - 2, num_rand_blocks), ABSENT, np.int32)
    for row in range(1, num_blocks - 1):
        seen = {*global_blocks, *options.window(row, num_blocks)}
        unseen = [block for block in range(end) if block not in seen]
        for head in range(num_heads):
            picked = generator.permutation(unseen)[:num_rand_blocks]
            drawn[head, row - 1, : len(picked)] = picked
    return drawn


def random_blocks(
    length: int,
    block_size: int,
    num_rand_blocks: int,
    num_heads: int,
    seed: int,
    first_tokens_lengths=FIRST_TOKENS_LENGTHS,
    built_for: int = BUILT_FOR_LENGTH,
) -> np.ndarray:
    """Draws the random blocks of one attention layer, bit for bit as in 2021.

    Args:
      seed: seeds a legacy numpy stream of this call's own; 2021 models use the layer's index.
      first_tokens_lengths: lengths that draw from the first 1,024 tokens of a pattern built
        for `built_for` tokens; others draw from the whole sequence.

    Returns:
      int32 `[H, N-2, R]`: the blocks of rows 1 … N-2.

    Raises:
      PatternError: where some row has fewer than R blocks to draw from.
    """
    num_blocks = _count_blocks(length, block_size)
    generator = np.random.RandomState(seed)
    from_first_tokens = (
        length in first_tokens_lengths and built_for >= length and built_for % block_size == 0
    )
    try:
        if not from_first_tokens:
            ends, counts = segment_plan(num_blocks, num_rand_blocks)
            return segment_blocks(num_blocks, ends, counts, num_heads, generator)
        heads = [
            first_tokens_blocks(
                built_for // block_size, block_size, num_rand_blocks, generator, RANDOM_BLOCKS_END
            )
            for _ in range(num_heads)
        ]
        return np.stack(heads)[:, : num_blocks - 2]
    except PatternError as error:
        raise PatternError(
            f"length S={length}, block size B={block_size}, random blocks r={num_rand_blocks}: "
            f"{error}; use full attention, fewer random blocks or a smaller block."
        ) from None


def _count_blocks(length: int, block_size: int) -> int:
    if length % block_size:
        raise ValueError(
            f"length {length} is not a multiple of block_size={block_size}: pad it first."
        )
    num_blocks = length // block_size
    if num_blocks < 4:
        raise PatternError(
            f"length S={length}, block size B={block_size}: {num_blocks} blocks are too few for a "
            "sparse pattern; use full attention or a smaller block."
        )
    return num_blocks


def first_tokens_blocks(
    num_blocks: int,
    block_size: int,
    num_rand_blocks: int,
    generator: np.random.RandomState,
    random_end: int,
) -> np.ndarray:
    """Random blocks of one head, drawn from the first `random_end` tokens: int32 `[N-2, R]`.

    A `random_end` of two blocks or fewer means the whole sequence.
    """
    middle = np.arange(1, num_blocks - 1)
    last = random_end // block_size - 1 if random_end > 2 * block_size else num_blocks - 1
    rows = []
    for row in range(1, num_blocks - 1):
        before = row - 2  # how many middle blocks lie left of the window
        if row == 1:
            candidates = middle[2:last]
        elif row == 2:
            candidates = middle[3:last]
        elif row >= num_blocks - 3 or before > last:
            candidates = middle[:last]
        elif row + 1 == last:
            candidates = middle[:before]
        else:
            candidates = np.concatenate([middle[:before], middle[row + 1 : last]])
        rows.append(_first(generator.permutation(candidates), num_rand_blocks, row))
    return np.array(rows, np.int32).reshape(num_blocks - 2, num_rand_blocks)


def segment_plan(num_blocks: int, num_rand_blocks: int) -> tuple[list[int], list[int]]:
    """Splits the blocks into segments: their ends, and how many blocks a row draws from each."""
    if 2 * num_rand_blocks + 5 < num_blocks:
        return [2 * num_rand_blocks + 5, num_blocks], [num_rand_blocks, 0]
    if num_rand_blocks + 5 < num_blocks:
        half = num_rand_blocks // 2
        return [num_rand_blocks + 5, num_blocks], [half, num_rand_blocks - half]
    return [num_blocks], [num_rand_blocks]


def segment_blocks(
    num_blocks: int,
    ends: list[int],
    counts: list[int],
    num_heads: int,
    generator: np.random.RandomState,
) -> np.ndarray:
    """Random blocks of all heads, drawn segment by segment: int32 `[H, N-2, sum(counts)]`."""
    starts = [0, *ends[:-1]]
    slots = np.concatenate([[0], np.cumsum(counts)])
    drawn = np.full((num_heads, num_blocks, slots[-1]), ABSENT, np.int32)

    def draw(rows, segment):
        if not counts[segment]:
            return
        for row in rows:
            for head in range(num_heads):
                drawn[head, row, slots[segment] : slots[segment + 1]] = _draw_from_segment(
                    row, starts[segment], ends[segment], counts[segment], generator
                )

    # The order of drawing decides the numbers, so it follows 2021 exactly.
    for segment, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if segment:
            draw(range(1, start), segment)
        for earlier in range(segment):
            draw(range(start, end), earlier)
        draw(range(max(start, 1), end), segment)
    return drawn[:, 1:-1]


def _draw_from_segment(row, start, end, count, generator):
    """Draws `count` of the blocks start … end-1 that `row` does not see already."""
    seen = {0, row - 1, row, row + 1, end - 1}
    if row == 1:
        seen.add(end - 2)
    if row == end - 2:
        seen.add(1)
    shuffled = generator.permutation(np.arange(start, end))
    return _first([block for block in shuffled if block not in seen], count, row)


def _first(candidates, count, row):
    if len(candidates) < count:
        raise PatternError(f"row {row} has only {len(candidates)} blocks for {count} random ones")
    return candidates[:count]
