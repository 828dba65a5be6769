"""Cuts a pattern, and its transpose, into tiles of equal size: numpy only.

Axis letters: H heads, N blocks, K blocks that one tile lists.

A *tile* is one block with at most K blocks of the other side. Query tiles are query blocks with
the key blocks they see; key tiles are key blocks with the query blocks that see them. A block
whose list is longer than K takes several tiles, so that a global block is just a long list.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from bigbird.core.block_layout import ABSENT, BlockLayout


@dataclasses.dataclass(frozen=True)
class TileTable:
    """The tiles of one side.

    Every block has a first tile; the rest of a longer list makes extra tiles, ordered by the
    length of the shortest input that needs them. Lists are ascending and end with `ABSENT`.

    Attributes:
      first: int32 `[H, N, K]`, the blocks that the first tile of each block lists.
      extra: int32 `[tiles, K]`, the blocks that the extra tiles list.
      extra_head, extra_block: int32 `[tiles]`, whose they are.
      extra_count: int32 `[N+1]`, how many of them an input of n blocks needs.
    """

    first: np.ndarray
    extra: np.ndarray
    extra_head: np.ndarray
    extra_block: np.ndarray
    extra_count: np.ndarray


def tile_tables(layout: BlockLayout) -> tuple[TileTable, TileTable]:
    """Returns the query tiles and the key tiles of a pattern."""
    num_heads, num_blocks, _ = layout.key_blocks.shape
    head, query, slot = np.nonzero(layout.key_blocks != ABSENT)
    key = layout.key_blocks[head, query, slot]
    # The global rows, which the layout leaves out, see every block.
    num_global = len(layout.global_blocks)
    global_head, global_row, global_key = np.indices((num_heads, num_global, num_blocks)).reshape(
        3, -1
    )
    head = np.concatenate([head, global_head])
    query = np.concatenate([query, layout.global_blocks[global_row]])
    key = np.concatenate([key, global_key])
    shape = (num_heads, num_blocks)
    return _cut(head, query, key, shape), _cut(head, key, query, shape)


def _cut(head, block, other, shape) -> TileTable:
    """Groups the pairs (block, other) of each head by block and cuts each list into tiles."""
    num_heads, num_blocks = shape
    order = np.lexsort((other, block, head))
    row = (head * num_blocks + block)[order]
    length = np.bincount(row, minlength=num_heads * num_blocks)
    place = np.arange(len(row)) - (np.cumsum(length) - length)[row]
    size = _tile_size(length)
    tiles = np.maximum(1, -(-length // size))
    first_tile = np.cumsum(tiles) - tiles
    listed = np.full((tiles.sum(), size), ABSENT, np.int32)
    listed[first_tile[row] + place // size, place % size] = other[order]

    extra = np.delete(listed, first_tile, axis=0)
    extra_head, extra_block = np.divmod(np.repeat(np.arange(len(tiles)), tiles - 1), num_blocks)
    # A tile serves an input that has its block and the first one it lists.
    needed = np.maximum(extra_block, extra[:, 0]) + 1
    order = np.argsort(needed, kind="stable")
    count = np.searchsorted(needed[order], np.arange(num_blocks + 1), side="right")
    return TileTable(
        listed[first_tile].reshape(num_heads, num_blocks, size),
        extra[order],
        extra_head[order].astype(np.int32),
        extra_block[order].astype(np.int32),
        count.astype(np.int32),
    )


def _tile_size(lengths: np.ndarray) -> int:
    """Chooses K for lists of the given lengths.

    A tile costs its K places and about one more, for its own block: the K of least cost.
    """
    lengths, times = np.unique(lengths, return_counts=True)
    sizes = np.arange(1, lengths[-1] + 1)
    tiles = -(-lengths // sizes[:, np.newaxis]) @ times
    return int(sizes[np.argmin(tiles * (sizes + 1))])
