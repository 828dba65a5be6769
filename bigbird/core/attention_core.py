"""The attention core: where queries meet keys, streamed so that no probability is ever kept.

Axis letters: B batch, H heads, L tokens, Q query tokens, T key tokens, E width of a head,
N blocks, S tokens in a block, K blocks that one tile lists, G tiles computed at once. In a tile,
O are the tokens of its own block and P those of its listed blocks.

A tile (`block_tiles`) is one block with K blocks of the other side. The output and the gradient
of the queries stream over query tiles; the gradients of keys and values stream over key tiles,
the transposed pattern, so that no step of a loop adds to the result of another. Rows differ only
in the blocks they list: a global row has many tiles, whose parts are merged by their
log-sum-exps, and dense attention lists one block that holds all tokens of the other side.

Kept for the backward pass: the output, and one float32 number per query, its log-sum-exp.

The forward and the backward pass are functions of their own in a graph, traced once for all layers
whose shapes agree, and large ones are compiled by XLA even where the graph around them is not.

Source: Zaheer et al., arXiv:2007.14062, section 2 and appendix D (the pattern); Dao et al.,
arXiv:2205.14135, section 3.1 and appendix B (streaming, gradients from the log-sum-exp).
"""

from __future__ import annotations

import functools
import math
from typing import Optional, Union

import numpy as np
import tensorflow as tf

from bigbird.core.block_layout import ABSENT, BlockLayout
from bigbird.core.block_tiles import TileTable, tile_tables
from bigbird.core.streaming import differentiable_once, plan_steps, size, split, stream

# What the tiles computed at once may occupy. They are fastest while they fit a processor's cache.
STEP_BYTES = 4 * 2**20
# From so many scores of first tiles on, a pass is worth the seconds that XLA takes to compile it.
COMPILED_SCORES = 2**22
# Extra tiles are counted in steps of so many to all first tiles.
EXTRA_TILE_STEPS = 32
# Tokens in a block of dense attention.
DENSE_BLOCK_SIZE = 128
# Stands for minus infinity, and unlike it can be subtracted from itself.
MASKED_SCORE = -1e30


def attend(
    query,
    key,
    value,
    token_mask=None,
    layout: BlockLayout | None = None,
    *,
    dropout_rate: float = 0.0,
    dropout_seed=None,
    memory_budget_bytes: int = STEP_BYTES,
):
    """Attention of queries to the keys that a pattern lists, without a matrix of scores.

    softmax(Q Kᵀ / sqrt(E)) V over the real tokens among the listed pairs. Softmax and sums are
    float32 whatever the compute dtype. A query with no key to see gives zeros and no gradient.

    Args:
      query: `[B, H, Q, E]`, float32, bfloat16 or float16. B, Q and T may be unknown until the
        graph runs.
      key, value: `[B, H, T, E]`.
      token_mask: boolean `[B, T]`, True = a real token; None, all are.
      layout: which blocks meet; None, all tokens. With a layout, Q = T is a multiple of the block
        size and at most the layout's length. A shorter input sees the pattern's first blocks, as
        if it were padded to the layout's length and the padding masked; rows of padding are zeros.
      dropout_rate: probability of dropping a pair after the softmax.
      dropout_seed: int32 `[2]`. It and the place of a pair decide whether the pair is dropped;
        neither the layout nor the memory budget does.
      memory_budget_bytes: what the tiles computed at once may occupy.

    Returns:
      `[B, H, Q, E]` in the dtype of `value`. It has no second derivative.

    Raises:
      ValueError: for shapes that fit neither each other nor the layout, a rate outside [0, 1), or
        a rate without a seed.
    """
    query, key, value = (tf.convert_to_tensor(x) for x in (query, key, value))
    if token_mask is not None:
        token_mask = tf.cast(token_mask, tf.bool)
    _check_shapes(query, key, value, token_mask, layout)
    dropout = _Dropout.draw(dropout_rate, dropout_seed, query, key)
    if token_mask is None:
        token_mask = tf.ones([size(key, 0), size(key, 2)], tf.bool)
    if layout is None:
        return _attend_densely(query, key, value, token_mask, dropout, memory_budget_bytes)
    query_tiles, key_tiles = _sparse_tiles(layout, query)
    return _attend_by_tiles(
        query,
        key,
        value,
        token_mask,
        token_mask,
        _Plan(query_tiles, key_tiles, dropout, int(memory_budget_bytes)),
    )


def _attend_densely(query, key, value, token_mask, dropout, memory_budget_bytes):
    query_block, key_block = _dense_block(query), _dense_block(key)
    length = size(query, 2)
    query_mask = tf.ones([size(query, 0), length], tf.bool)
    query, query_mask = _pad(query, 2, query_block), _pad(query_mask, 1, query_block)
    key, value = _pad(key, 2, key_block), _pad(value, 2, key_block)
    token_mask = _pad(token_mask, 1, key_block)
    plan = _Plan(
        _dense_tiles(query, query_block, key),
        _dense_tiles(key, key_block, query),
        dropout.pad(query_block, key_block),
        int(memory_budget_bytes),
    )
    output = _attend_by_tiles(query, key, value, query_mask, token_mask, plan)
    return output[:, :, :length]


def _attend_by_tiles(query, key, value, query_mask, key_mask, plan):
    """Streams both passes. Lengths are multiples of the tiles' blocks; masks are `[B, L]`."""
    num_heads, width = query.shape[1], query.shape[3]
    query_mask, key_mask = (
        tf.reshape(tf.repeat(mask, num_heads, axis=0), [-1]) for mask in (query_mask, key_mask)
    )

    def tokens(tensor):
        return tf.reshape(tensor, [-1, width])

    @tf.custom_gradient
    def streamed(query, key, value):
        # Copies that no tape watches: an eager tape would keep all that the loop computes.
        unwatched = [tokens(tf.stop_gradient(x)) for x in (query, key, value)]
        output, normalizer = _forward(*unwatched, query_mask, key_mask, plan)

        def gradients(*inputs):
            return _backward(*inputs, normalizer, key_mask, plan)

        def backward(upstream):
            inputs = (tokens(x) for x in (query, key, value, output, upstream))
            found = differentiable_once(gradients, *inputs)
            return [
                tf.reshape(gradient, tf.shape(x))
                for gradient, x in zip(found, (query, key, value), strict=True)
            ]

        return tf.reshape(output, tf.shape(query)), backward

    return streamed(query, key, value)


# ---------------------------------------------------------------------------- the two passes


def _shared(function):
    """Makes a function whose last argument is a `_Plan` one that all layers share, if it can be."""
    traced = tf.function(function, autograph=False)
    compiled = tf.function(function, autograph=False, jit_compile=True)

    @functools.wraps(function)
    def choose(*arguments):
        if tf.executing_eagerly():
            return function(*arguments)
        num_scores = arguments[-1].query_tiles.first.num_scores()
        large = num_scores is not None and num_scores >= COMPILED_SCORES
        return (compiled if large else traced)(*arguments)

    return choose


@_shared
def _forward(query, key, value, query_mask, key_mask, plan):
    """Returns the output `[B·H·Q, E]` and the log-sum-exps `[B·H·Q]`, infinite for empty rows."""
    tiles = plan.query_tiles

    def tile_output(tile):
        scores = _masked_scores(tile, query, tile.listed(key), key_mask)
        largest = tf.reduce_max(scores, axis=-1, keepdims=True)
        weights = tf.exp(scores - largest)
        total = tf.reduce_sum(weights, axis=-1, keepdims=True)
        weights = plan.dropout.of_query_tile(weights, tile)
        output = _product("GOP,GPE->GOE", weights, tile.listed(value)) / total
        return output, tf.squeeze(largest + tf.math.log(total), axis=-1)

    block_size = tiles.first.block_size
    shapes = [[block_size, query.shape[-1]], [block_size]]
    output, normalizer = _map_tiles(tile_output, tiles.first, query, shapes, plan)
    if tiles.extra:
        extra = _map_tiles(tile_output, tiles.extra, query, shapes, plan, output)
        output, normalizer = _merge((output, normalizer), extra, tiles.extra.block)
    output, normalizer = tf.reshape(output, tf.shape(query)), tf.reshape(normalizer, [-1])
    not_empty = query_mask & (normalizer > MASKED_SCORE / 2)
    # An infinite normalizer makes every probability of the row, recomputed from it, zero.
    return (
        tf.cast(tf.where(not_empty[:, tf.newaxis], output, 0.0), value.dtype),
        tf.where(not_empty, normalizer, float("inf")),
    )


def _merge(first, extra, extra_block):
    """Joins what the extra tiles saw to what the first tiles saw of the keys.

    Args:
      first: output `[N, S, E]` and log-sum-exps `[N, S]` of the first tile of each block.
      extra: the same `[tiles, …]` of the extra tiles.
      extra_block: int32 `[tiles]`, the block of each.

    Returns:
      Output `[N, S, E]` and log-sum-exps `[N, S]` over all keys.
    """
    index = extra_block[:, tf.newaxis]
    (first_output, first_normalizer), (extra_output, extra_normalizer) = first, extra
    largest = tf.tensor_scatter_nd_max(first_normalizer, index, extra_normalizer)
    first_weight = tf.exp(first_normalizer - largest)
    extra_weight = tf.exp(extra_normalizer - tf.gather(largest, extra_block))
    total = tf.tensor_scatter_nd_add(first_weight, index, extra_weight)
    extra_weight = extra_weight[..., tf.newaxis]
    output = tf.tensor_scatter_nd_add(
        first_output * first_weight[..., tf.newaxis],
        index,
        # What an empty tile holds may have overflowed in float16.
        tf.where(extra_weight > 0, extra_output * extra_weight, 0.0),
    )
    return output / total[..., tf.newaxis], largest + tf.math.log(total)


@_shared
def _backward(query, key, value, output, upstream, normalizer, key_mask, plan):
    """Returns the gradients of query, key and value, each `[B·H·L, E]`.

    With probabilities P, upstream gradient U and delta = rowsum(U ∘ output):
    dV = Pᵀ U, dS = P ∘ (U Vᵀ - delta), dQ = dS K / sqrt(E), dK = dSᵀ Q / sqrt(E).
    """
    scale = query.shape[-1] ** -0.5
    delta = tf.reduce_sum(tf.cast(upstream, tf.float32) * tf.cast(output, tf.float32), axis=-1)

    def query_gradient(tile):
        keys = tile.listed(key)
        scores = _masked_scores(tile, query, keys, key_mask)
        probabilities = tf.exp(scores - tile.own(normalizer)[:, :, tf.newaxis])
        slopes = _product("GOE,GPE->GOP", tile.own(upstream), tile.listed(value))
        slopes = plan.dropout.of_query_tile(slopes, tile)
        score_gradient = probabilities * (slopes - tile.own(delta)[:, :, tf.newaxis])
        return (_product("GOP,GPE->GOE", score_gradient, keys) * scale,)

    def key_value_gradients(tile):
        queries, upstreams = tile.listed(query), tile.listed(upstream)
        scores = _product("GOE,GPE->GOP", tile.own(key) * scale, queries)
        normalizers = tf.where(tile.listed_places(), tile.listed(normalizer), float("inf"))
        probabilities = tf.exp(scores - normalizers[:, tf.newaxis])
        slopes = _product("GOE,GPE->GOP", tile.own(value), upstreams)
        slopes = plan.dropout.of_key_tile(slopes, tile)
        score_gradient = probabilities * (slopes - tile.listed(delta)[:, tf.newaxis])
        probabilities = plan.dropout.of_key_tile(probabilities, tile)
        key_gradient = _product("GOP,GPE->GOE", score_gradient, queries) * scale
        value_gradient = _product("GOP,GPE->GOE", probabilities, upstreams)
        real = tile.own(key_mask)[:, :, tf.newaxis]
        return tf.where(real, key_gradient, 0.0), tf.where(real, value_gradient, 0.0)

    def summed(function, tiles, tokens, num_results, newest):
        shapes = [[tiles.first.block_size, tokens.shape[-1]]] * num_results
        sums = _map_tiles(function, tiles.first, tokens, shapes, plan, newest)
        if tiles.extra:
            index = tiles.extra.block[:, tf.newaxis]
            parts = _map_tiles(function, tiles.extra, tokens, shapes, plan, sums[0])
            sums = [
                tf.tensor_scatter_nd_add(total, index, part)
                for total, part in zip(sums, parts, strict=True)
            ]
        return [tf.reshape(tf.cast(x, tokens.dtype), tf.shape(tokens)) for x in sums]

    # One loop after the other, although they could run side by side: each begins with buffers.
    query_gradients = summed(query_gradient, plan.query_tiles, query, 1, upstream)
    key_gradients = summed(key_value_gradients, plan.key_tiles, key, 2, query_gradients[0])
    return [*query_gradients, *key_gradients]


def _masked_scores(tile, query, keys, key_mask):
    """Scaled scores `[G, O, P]` of a query tile, `MASKED_SCORE` where there is no key."""
    scores = _product("GOE,GPE->GOP", tile.own(query) * keys.shape[-1] ** -0.5, keys)
    visible = tile.listed(key_mask) & tile.listed_places()
    return tf.where(visible[:, tf.newaxis], scores, MASKED_SCORE)


def _product(equation, left, right):
    """Multiplies in the dtype of `right`; the result is float32."""
    return tf.cast(tf.einsum(equation, tf.cast(left, right.dtype), right), tf.float32)


# ---------------------------------------------------------------------------- tiles


class _Tiles(tf.experimental.ExtensionType):
    """Tiles of all batch rows and heads, whose tokens lie one after another, `[B·H·L, …]`.

    Attributes:
      block: int32 `[tiles]`, the own block of each, counted over batch rows and heads.
      listed_blocks: int32 `[tiles, K]`, blocks of the other side, counted likewise.
      present: boolean `[tiles, K]`, False where a place is not used.
      block_size, listed_block_size: tokens in a block of either side.
    """

    block: tf.Tensor
    listed_blocks: tf.Tensor
    present: tf.Tensor
    block_size: Union[int, tf.Tensor]
    listed_block_size: Union[int, tf.Tensor]

    def num_scores(self):
        """The scores of all these tiles, or None where the graph does not know how many."""
        sizes = *self.present.shape, self.block_size, self.listed_block_size
        return math.prod(sizes) if all(isinstance(x, int) for x in sizes) else None

    def of(self, block, listed_blocks, present):
        """Some of these tiles."""
        return _Tiles(block, listed_blocks, present, self.block_size, self.listed_block_size)

    def own(self, tokens):
        """The tokens of each own block: `[tokens, …]` -> `[tiles, O, …]`."""
        blocks = tf.reshape(tokens, [-1, self.block_size, *tokens.shape[1:]])
        return tf.gather(blocks, self.block)

    def listed(self, tokens):
        """The tokens of each tile's listed blocks: `[tokens, …]` -> `[tiles, P, …]`."""
        rest = tokens.shape[1:]
        blocks = tf.reshape(tokens, [-1, self.listed_block_size, *rest])
        places = self.present.shape[1] * self.listed_block_size
        return tf.reshape(tf.gather(blocks, self.listed_blocks), [-1, places, *rest])

    def listed_places(self):
        """Whether each place of a listed token is used: boolean `[tiles, P]`."""
        return tf.repeat(self.present, self.listed_block_size, axis=1)

    def bytes(self, width, dtype):
        """What the computation of one tile occupies: three of its score matrices, two gathers."""
        places = self.present.shape[1] * self.listed_block_size
        return places * (3 * self.block_size * tf.float32.size + 2 * width * dtype.size)


class _Side(tf.experimental.ExtensionType):
    """The tiles of one side: the first of every block, and, where lists are longer, the others."""

    first: _Tiles
    extra: Optional[_Tiles] = None


class _Plan(tf.experimental.ExtensionType):
    """How one call streams: the tiles of either side, dropout, and the bytes of a step."""

    query_tiles: _Side
    key_tiles: _Side
    dropout: _Dropout
    step_bytes: int


def _sparse_tiles(layout, query):
    """Returns the query side and the key side of a pattern, for the blocks that the input has."""
    batch, num_heads, length = (size(query, axis) for axis in range(3))
    num_blocks = length // layout.block_size

    def tiles(head, block, listed):
        first_block = (tf.range(batch)[:, tf.newaxis] * num_heads + head) * num_blocks
        present = (listed >= 0) & (listed < num_blocks)
        listed = first_block[..., tf.newaxis] + tf.where(present, listed, 0)
        return _Tiles(
            tf.reshape(first_block + block, [-1]),
            tf.reshape(listed, [-1, present.shape[-1]]),
            tf.tile(present, [batch, 1]),
            layout.block_size,
            layout.block_size,
        )

    def side(table: TileTable):
        first = tf.reshape(tf.constant(table.first)[:, :num_blocks], [-1, table.first.shape[-1]])
        row = tf.range(num_heads * num_blocks)
        first_tiles = tiles(row // num_blocks, row % num_blocks, first)
        extra_tiles = table.extra_head, table.extra_block, table.extra
        if isinstance(num_blocks, int):
            count = int(table.extra_count[num_blocks])
            if count == 0:
                return _Side(first_tiles)
            # Counts differ a little from layer to layer: fill up, so that layers share a trace.
            filled = _round_up(count, max(1, num_heads * num_blocks // EXTRA_TILE_STEPS))
            head, block, listed = (_fill_with_empty(x[:count], filled) for x in extra_tiles)
        else:
            count = tf.gather(table.extra_count, num_blocks)
            head, block, listed = (tf.constant(x)[:count] for x in extra_tiles)
        return _Side(first_tiles, tiles(head, block, listed))

    return [side(table) for table in tile_tables(layout)]


def _fill_with_empty(rows, count):
    """Adds tiles that list nothing: rows of `ABSENT`, which stand for block 0 of head 0."""
    missing = count - len(rows)
    if rows.ndim == 1:
        return np.pad(rows, [0, missing])
    return np.pad(rows, [[0, missing], [0, 0]], constant_values=ABSENT)


def _dense_tiles(own, block_size, other):
    """Every block of `own` with all tokens of `other` of its batch row and head."""
    blocks_per_head = size(own, 2) // block_size
    block = tf.range(size(own, 0) * own.shape[1] * blocks_per_head)
    listed = (block // blocks_per_head)[:, tf.newaxis]
    present = tf.ones_like(listed, tf.bool)
    return _Side(_Tiles(block, listed, present, block_size, size(other, 2)))


def _map_tiles(function, tiles, tokens, result_shapes, plan, newest=None):
    """Applies `function` to as many tiles at once as the budget allows.

    Args:
      function: of `_Tiles`; returns one float32 tensor `[tiles, *shape]` for each result shape.
      tokens: `[…, E]`, like those that the tiles gather.
      newest: a floating tensor that the loop waits for; None, `tokens`.

    Returns:
      The results of all tiles.
    """
    num_tiles = size(tiles.block, 0)
    fitting = plan.step_bytes // tiles.bytes(tokens.shape[-1], tokens.dtype)
    steps, at_once = plan_steps(num_tiles, fitting)
    inputs = [split(x, steps, at_once) for x in (tiles.block, tiles.listed_blocks, tiles.present)]

    def step(number, sums):
        return list(function(tiles.of(*(x[number] for x in inputs)))), sums

    shapes = [[at_once, *shape] for shape in result_shapes]
    results, _ = stream(step, steps, shapes, tokens if newest is None else newest)
    return [
        tf.reshape(result, [-1, *shape])[:num_tiles]
        for result, shape in zip(results, result_shapes, strict=True)
    ]


# ---------------------------------------------------------------------------- dropout


class _Dropout(tf.experimental.ExtensionType):
    """Dropout of pairs, by a hash of random bits of the query and of the key.

    Both orders of a pair give the same decision, so that the backward pass over key tiles repeats
    that of the forward pass over query tiles.

    Attributes:
      rate: probability of dropping a pair.
      query_bits, key_bits: uint32 `[B, H, L]`; None where nothing is dropped.
    """

    rate: float
    query_bits: Optional[tf.Tensor]
    key_bits: Optional[tf.Tensor]

    @classmethod
    def draw(cls, rate, seed, query, key):
        """Draws the bits of every token from an int32 seed `[2]`."""
        if not 0 <= rate < 1 or (rate > 0 and seed is None):
            raise ValueError(
                "Expected dropout_rate in [0, 1), and dropout_seed, int32 [2], where the rate is "
                f"not 0; received {rate} and seed {seed}."
            )
        if rate == 0:
            return cls(0.0, None, None)

        def bits(tensor, salt):
            salted = tf.random.fold_in(seed, salt, alg="philox")
            shape = tf.shape(tensor)[:3]
            return tf.random.stateless_uniform(shape, salted, None, None, tf.uint32, alg="philox")

        return cls(float(rate), bits(query, 0), bits(key, 1))

    def pad(self, query_block, key_block):
        if self.rate == 0:
            return self
        return _Dropout(
            self.rate, _pad(self.query_bits, 2, query_block), _pad(self.key_bits, 2, key_block)
        )

    def of_query_tile(self, values, tile):
        return self._apply(values, tile, self.query_bits, self.key_bits)

    def of_key_tile(self, values, tile):
        return self._apply(values, tile, self.key_bits, self.query_bits)

    def _apply(self, values, tile, own_bits, listed_bits):
        """Drops and rescales `values` `[G, O, P]`."""
        if self.rate == 0:
            return values
        own = tile.own(tf.reshape(own_bits, [-1]))[:, :, tf.newaxis]
        listed = tile.listed(tf.reshape(listed_bits, [-1]))[:, tf.newaxis]
        keep = _mix(own + listed) >= tf.constant(round(self.rate * 2**32), tf.uint32)
        return tf.where(keep, values / (1 - self.rate), 0.0)


def _mix(bits):
    """Spreads uint32 bits: the last rounds of MurmurHash3 (Appleby, 2011)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, None)):
        bits = tf.bitwise.bitwise_xor(
            bits, tf.bitwise.right_shift(bits, tf.constant(shift, tf.uint32))
        )
        if factor is not None:
            bits *= tf.constant(factor, tf.uint32)
    return bits


# ---------------------------------------------------------------------------- shapes


def _round_up(number, step):
    return number + -number % step


def _pad(tensor, axis, multiple):
    """Pads an axis with zeros (False) to a multiple."""
    missing = -size(tensor, axis) % multiple
    if isinstance(missing, int) and missing == 0:
        return tensor
    paddings = [[0, 0]] * tensor.shape.rank
    paddings[axis] = [0, missing]
    return tf.pad(tensor, paddings)


def _dense_block(tensor):
    length = tensor.shape[2]
    return DENSE_BLOCK_SIZE if length is None else min(DENSE_BLOCK_SIZE, length)


def _check_shapes(query, key, value, token_mask, layout):
    fits = (
        query.shape.rank == key.shape.rank == 4
        and key.shape.is_compatible_with([*query.shape[:2], None, query.shape[3]])
        and value.shape.is_compatible_with(key.shape)
        and (token_mask is None or token_mask.shape.is_compatible_with(key.shape[::2]))
        and query.dtype == key.dtype == value.dtype
    )
    if not fits:
        raise ValueError(
            "Expected query [B, H, Q, E], key and value [B, H, T, E] of one dtype and token_mask "
            f"[B, T]; received query {query.dtype.name} {query.shape}, key {key.dtype.name} "
            f"{key.shape}, value {value.dtype.name} {value.shape} and token_mask "
            f"{None if token_mask is None else token_mask.shape}."
        )
    if layout is None:
        return
    block_size, (num_heads, num_blocks, _) = layout.block_size, layout.key_blocks.shape
    length = query.shape[2]
    if (
        query.shape[1] != num_heads
        or not query.shape.is_compatible_with(key.shape)
        or (length is not None and not 0 < length <= num_blocks * block_size)
        or (length is not None and length % block_size)
    ):
        raise ValueError(
            f"The layout is for {num_heads} heads, 1 to {num_blocks} blocks of {block_size} "
            f"tokens, and as many queries as keys; received query {query.shape} and key "
            f"{key.shape}. Pad the input to whole blocks, or build the layout for more."
        )
