"""Multi-headed attention: dense, simulated sparse and block sparse, over one pattern.

Axis letters: B batch, H heads, L tokens, Q query tokens, T key tokens, E width of a head, D model,
N blocks, S tokens in a block, R random blocks.

All three compute softmax(Q Kᵀ / sqrt(E) + mask) V and differ in the pairs they look at: all of
them, or those of a `block_layout.BlockLayout`, by a dense score matrix (the readable reference)
or streamed over blocks by `attention_core` (linear in L). Scores and softmax are float32 whatever
the compute dtype. A row with no key to attend to gives zeros.

Source: Vaswani et al., arXiv:1706.03762, section 3.2; Zaheer et al., arXiv:2007.14062, section 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras as keras

from bigbird.core import block_layout
from bigbird.core.attention_core import attend
from bigbird.core.block_layout import PatternOptions
from bigbird.core.layers import build_in_scope, create_initializer, get_activation
from bigbird.core.recompute_grad import RecomputingDropout
from bigbird.core.streaming import size

# From so many pairs of a query and a key on, streamed full attention is faster than one matrix of
# scores, and takes a fraction of its memory (benchmarks/bench_attention.py).
STREAMED_PAIRS = 2**20


def masked_softmax(scores, mask=None):
    """Softmax over the last axis of float32 `scores` where boolean `mask` allows it.

    Masked places get probability 0; a fully masked row is all zeros, never NaN.
    """
    if mask is None:
        return tf.nn.softmax(scores)
    probabilities = tf.nn.softmax(tf.where(mask, scores, scores.dtype.min))
    return tf.where(mask, probabilities, 0.0)


def dense_attention(query, key, value, mask=None, bias=None, dropout=None):
    """Attention of every query to every key.

    Args:
      query: `[B, H, Q, E]`; key, value: `[B, H, T, E]`.
      mask: boolean, broadcastable to `[B, H, Q, T]`; True = attend.
      bias: float32, broadcastable to `[B, H, Q, T]`, added to the scaled scores.
      dropout: a function applied to the probabilities.

    Returns:
      `[B, H, Q, E]` in the dtype of `value`.
    """
    scores = tf.cast(tf.einsum("BHQE,BHTE->BHQT", query, key), tf.float32)
    scores *= query.shape[-1] ** -0.5
    if bias is not None:
        scores += bias
    probabilities = tf.cast(masked_softmax(scores, mask), value.dtype)
    if dropout is not None:
        probabilities = dropout(probabilities)
    return tf.einsum("BHQT,BHTE->BHQE", probabilities, value)


def simulated_sparse_attention(query, key, value, token_mask, layout, dropout=None):
    """The block-sparse pattern by a dense `[L, L]` score matrix: the reference, quadratic in L.

    A key block that a row lists m times weighs m times: its scores get log(m).

    Args: as those of `attention_core.attend`, which gives the same numbers, and `dropout` as that
      of `dense_attention`.
    """
    num_blocks = query.shape[2] // layout.block_size
    key_blocks = tf.constant(layout.key_blocks)
    counts = tf.reduce_sum(tf.one_hot(key_blocks, layout.num_blocks), axis=-2)
    is_global = tf.one_hot(layout.global_blocks, layout.num_blocks)
    is_global = tf.reduce_sum(is_global, axis=0)[:, tf.newaxis]
    counts = tf.maximum(counts, is_global)[:, :num_blocks, :num_blocks]
    for axis in (1, 2):
        counts = tf.repeat(counts, layout.block_size, axis=axis)
    mask = (counts > 0) & token_mask[:, tf.newaxis, tf.newaxis, :]
    bias = tf.math.log(tf.maximum(counts, 1.0))
    context = dense_attention(query, key, value, mask, bias, dropout)
    return _zero_padded_queries(context, token_mask)


def _zero_padded_queries(context, token_mask):
    return tf.where(token_mask[:, tf.newaxis, :, tf.newaxis], context, tf.zeros([], context.dtype))


class MultiHeadedAttentionLayer(keras.layers.Layer):
    """Projects to queries, keys and values and attends, head by head.

    q, k, v = x W_q + b_q, …, each kernel `[D, H·E]`; the output projection belongs to the layer
    around it.

    The sparse types apply attention dropout only where `sparse_attention_dropout` asks for it: in
    2021 they never did.
    """

    def __init__(
        self,
        attention_type: str,
        num_attention_heads: int = 1,
        size_per_head: int = 512,
        num_rand_blocks: int = 3,
        from_seq_length: int = 1024,
        to_seq_length: int = 1024,
        from_block_size: int = 64,
        to_block_size: int = 64,
        attention_probs_dropout_prob: float = 0.0,
        initializer_range: float = 0.02,
        use_bias: bool = True,
        seed: int | None = None,
        query_act=None,
        key_act=None,
        value_act=None,
        name: str | None = None,
        pattern_length: str = "model",
        max_position_embeddings: int = block_layout.BUILT_FOR_LENGTH,
        pattern: PatternOptions | Mapping[str, Any] = block_layout.BIGBIRD_2021,
        sparse_attention_dropout: bool = False,
        **kwargs,
    ):
        """Creates the layer.

        Args:
          from_seq_length: the length the pattern is built for (`pattern_length="model"`).
          seed: of the random blocks; the layer's index in 2021 models, 0 where None.
          pattern_length: "model", the pattern of `from_seq_length` tokens whatever the input's
            length; "input", the pattern of each input's own length.
          max_position_embeddings: of the model; the "input" patterns depend on it.
          pattern: options beyond 2021, or a dict of them.
          sparse_attention_dropout: whether the sparse types apply the dropout.

        Raises:
          ValueError: for an unknown attention type, or sparse attention between unlike lengths
            or blocks.
        """
        super().__init__(name=name, **kwargs)
        if attention_type not in ("original_full", "simulated_sparse", "block_sparse"):
            raise ValueError(
                f"attention_type={attention_type!r}: expected original_full, simulated_sparse or "
                "block_sparse."
            )
        if attention_type != "original_full" and (
            from_seq_length != to_seq_length or from_block_size != to_block_size
        ):
            raise ValueError(
                f"attention_type={attention_type!r} is self-attention: expected equal lengths and "
                f"blocks, received lengths {from_seq_length}, {to_seq_length} and blocks "
                f"{from_block_size}, {to_block_size}."
            )
        self.attention_type = attention_type
        self.num_attention_heads = num_attention_heads
        self.size_per_head = size_per_head
        self.num_rand_blocks = num_rand_blocks
        self.from_seq_length = from_seq_length
        self.to_seq_length = to_seq_length
        self.from_block_size = from_block_size
        self.to_block_size = to_block_size
        self.attention_probs_dropout_prob = attention_probs_dropout_prob
        self.initializer_range = initializer_range
        self.use_bias = use_bias
        self.seed = seed
        self.query_act = query_act
        self.key_act = key_act
        self.value_act = value_act
        self.pattern_length = pattern_length
        self.max_position_embeddings = max_position_embeddings
        if not isinstance(pattern, PatternOptions):
            pattern = PatternOptions(**pattern)
        self.pattern = pattern
        self.sparse_attention_dropout = sparse_attention_dropout

        def projection(kind, activation):
            return keras.layers.Dense(
                num_attention_heads * size_per_head,
                activation=get_activation(activation),
                use_bias=use_bias,
                kernel_initializer=create_initializer(initializer_range),
                name=f"{self.name}/{kind}",
                dtype=self.dtype_policy,
            )

        self.query = projection("query", query_act)
        self.key = projection("key", key_act)
        self.value = projection("value", value_act)
        self.dropout = RecomputingDropout(
            attention_probs_dropout_prob, name=f"{self.name}/dropout", dtype=self.dtype_policy
        )
        self._model_layout = self._pattern_of_the_model()

    def _pattern_of_the_model(self):
        if self.attention_type == "original_full" or self.pattern_length != "model":
            return None
        block_size = self.from_block_size
        return block_layout.model_layout(
            self.from_seq_length + -self.from_seq_length % block_size,
            block_size,
            self.num_rand_blocks,
            self.num_attention_heads,
            self.seed or 0,
            self.pattern,
        )

    def layout(self, length: int | None):
        """The pattern for an input of `length` tokens, or None where it is attended in full.

        Raises:
          ValueError: where the pattern follows the input's length and that is unknown.
        """
        if self.attention_type == "original_full" or self.pattern_length == "model":
            return self._model_layout
        if length is None:
            raise ValueError(
                'pattern_length="input" needs inputs of a length known when the graph is made; '
                "received an unknown length: batch to fixed lengths."
            )
        return block_layout.input_layout(
            length,
            self.from_block_size,
            self.num_rand_blocks,
            self.num_attention_heads,
            self.seed or 0,
            self.max_position_embeddings,
            self.pattern,
        )

    def build(self, input_shape):
        for projection in (self.query, self.key, self.value):
            build_in_scope(projection, [None, None, input_shape[-1]])
        self.built = True

    def call(self, from_tensor, to_tensor, masks=None, training=None):
        """Attends from `[B, Q, D]` to `[B, T, D]`.

        Args:
          masks: None; a boolean mask `[B, T]` of real keys, or `[B, 1, Q, T]` of pairs (only
            `original_full`); or 2021's list (attention_mask, band_mask, from_mask, to_mask,
            from_blocked_mask, to_blocked_mask).

        Returns:
          `[B, Q, H, E]`.
        """
        mask = _boolean_mask(masks)
        query = self.queries(from_tensor, size(from_tensor, 1))
        key, value = self.keys_and_values(to_tensor, size(to_tensor, 1))
        layout = self.layout(query.shape[2])
        if layout is None:
            context = self._attend_to_all(query, key, value, mask, training)
        else:
            if mask is None:
                mask = tf.ones(tf.shape(to_tensor)[:2], tf.bool)
            training = training if self.sparse_attention_dropout else False
            if self.attention_type == "simulated_sparse":
                dropout = self._dropout_in(training)
                context = simulated_sparse_attention(query, key, value, mask, layout, dropout)
            else:
                context = self._streamed(query, key, value, mask, layout, training)
        return tf.transpose(context, [0, 2, 1, 3])

    def queries(self, tensor, length):
        """Projects `[B, L, D]`, or `[B·L, D]`, to queries `[B, H, L, E]`."""
        return self._split_heads(self.query(tensor), length)

    def keys_and_values(self, tensor, length):
        """Projects `[B, L, D]`, or `[B·L, D]`, to keys and values `[B, H, L, E]`."""
        return tuple(
            self._split_heads(project(tensor), length) for project in (self.key, self.value)
        )

    def _split_heads(self, tensor, length):
        shape = [-1, length, self.num_attention_heads, self.size_per_head]
        return tf.transpose(tf.reshape(tensor, shape), [0, 2, 1, 3])

    def _attend_to_all(self, query, key, value, mask, training):
        """Full attention: streamed where that is faster and the mask is one of keys."""
        by_key = mask is None or mask.shape.rank == 2 or mask.shape[1:-1] == [1, 1]
        num_pairs = tf.TensorShape([query.shape[2], key.shape[2]]).num_elements()
        if by_key and num_pairs is not None and num_pairs >= STREAMED_PAIRS:
            if mask is not None:
                mask = mask[:, 0, 0] if mask.shape.rank == 4 else mask
                mask = tf.broadcast_to(mask, tf.shape(key)[::2])
            return self._streamed(query, key, value, mask, None, training)
        if mask is not None and mask.shape.rank == 2:
            mask = mask[:, tf.newaxis, tf.newaxis]
        return dense_attention(query, key, value, mask, dropout=self._dropout_in(training))

    def _dropout_in(self, training):
        return lambda probabilities: self.dropout(probabilities, training=training)

    def _streamed(self, query, key, value, token_mask, layout, training):
        def with_dropout():
            return attend(
                query,
                key,
                value,
                token_mask,
                layout,
                dropout_rate=self.attention_probs_dropout_prob,
                dropout_seed=self.dropout.next_seed(),
            )

        return self.dropout.choose(
            training, with_dropout, lambda: attend(query, key, value, token_mask, layout)
        )

    def get_config(self):
        return {
            **super().get_config(),
            "attention_type": self.attention_type,
            "num_attention_heads": self.num_attention_heads,
            "size_per_head": self.size_per_head,
            "num_rand_blocks": self.num_rand_blocks,
            "from_seq_length": self.from_seq_length,
            "to_seq_length": self.to_seq_length,
            "from_block_size": self.from_block_size,
            "to_block_size": self.to_block_size,
            "attention_probs_dropout_prob": self.attention_probs_dropout_prob,
            "initializer_range": self.initializer_range,
            "use_bias": self.use_bias,
            "seed": self.seed,
            "query_act": self.query_act,
            "key_act": self.key_act,
            "value_act": self.value_act,
            "pattern_length": self.pattern_length,
            "max_position_embeddings": self.max_position_embeddings,
            "pattern": dataclasses.asdict(self.pattern),
            "sparse_attention_dropout": self.sparse_attention_dropout,
        }


def _boolean_mask(masks):
    """Reduces any of the accepted mask forms to a boolean `[B, T]` or `[B, 1, Q, T]` tensor."""
    if isinstance(masks, (list, tuple)):
        attention_mask, _, _, to_mask = masks[:4]
        if attention_mask is None and to_mask is not None:
            masks = to_mask[:, 0, 0, :]
        else:
            masks = attention_mask
    return None if masks is None else tf.cast(masks, tf.bool)


def bigbird_block_sparse_attention(
    query_layer,
    key_layer,
    value_layer,
    band_mask,
    from_mask,
    to_mask,
    from_blocked_mask,
    to_blocked_mask,
    rand_attn,
    num_attention_heads,
    size_per_head,
    num_rand_blocks,
    from_seq_length,
    to_seq_length,
    from_block_size,
    to_block_size,
):
    """Block-sparse attention with the 2021 toolkit's arguments.

    Args:
      query_layer, key_layer, value_layer: `[B, H, L, E]`.
      from_mask, to_mask: `[B, 1, L, 1]` and `[B, 1, 1, L]`, 1 = a real token.
      rand_attn: int32 `[H, N-2, R]`, the random blocks of each row.
      band_mask, from_blocked_mask, to_blocked_mask and the sizes: told by the tensors already.

    Returns:
      `[B, L, H, E]`.
    """
    layout = block_layout.layout_from_random_blocks(np.asarray(rand_attn), from_block_size)
    token_mask = tf.cast(to_mask[:, 0, 0, :], tf.bool)
    context = attend(query_layer, key_layer, value_layer, token_mask, layout)
    return tf.transpose(context, [0, 2, 1, 3])


def create_attention_mask_from_input_mask(from_mask, to_mask):
    """Outer product of token masks `[B, Q]` and `[B, T]`: `[B, 1, Q, T]`, as in 2021."""
    return tf.einsum("BQ,BT->BQT", from_mask, to_mask)[:, tf.newaxis]


def create_band_mask_from_inputs(from_blocked_mask, to_blocked_mask):
    """Window mask of the middle rows from blocked masks `[B, N, S]`: `[B, 1, N-4, S, 3S]`."""
    window = tf.concat(
        [to_blocked_mask[:, 1:-3], to_blocked_mask[:, 2:-2], to_blocked_mask[:, 3:-1]], axis=2
    )
    return tf.einsum("BNS,BNT->BNST", from_blocked_mask[:, 2:-2], window)[:, tf.newaxis]


def get_rand_attn_plan(from_seq_length, from_block_size, num_rand_blocks):
    """Segments of the random blocks: their ends in tokens, and the blocks drawn from each."""
    num_blocks = from_seq_length // from_block_size
    ends, counts = block_layout.segment_plan(num_blocks, num_rand_blocks)
    return [end * from_block_size for end in ends], counts


def bigbird_block_rand_mask(
    from_seq_length,
    to_seq_length,
    from_block_size,
    to_block_size,
    num_rand_blocks,
    last_idx=-1,
    seed=0,
):
    """Random blocks of one head, from the first `last_idx` tokens (all where -1): `[N-2, R]`.

    The draw comes from a generator of its own with the given seed; 2021 drew from numpy's
    global stream.
    """
    _check_equal_blocks(from_seq_length, to_seq_length, from_block_size, to_block_size)
    return block_layout.first_tokens_blocks(
        from_seq_length // from_block_size,
        from_block_size,
        num_rand_blocks,
        np.random.RandomState(seed),
        last_idx,
    )


def bigbird_block_rand_mask_with_head(
    seq_length, block_size, num_heads, plan_from_length, plan_num_rand_blocks, seed=0
):
    """Random blocks of all heads by a segment plan (`get_rand_attn_plan`): `[H, N-2, R]`."""
    return block_layout.segment_blocks(
        seq_length // block_size,
        [end // block_size for end in plan_from_length],
        list(plan_num_rand_blocks),
        num_heads,
        np.random.RandomState(seed),
    )


def full_bigbird_mask(from_seq_length, to_seq_length, from_block_size, to_block_size, rand_attn):
    """The pattern of one head as a 0/1 matrix `[L, L]`, from its random blocks `[N-2, R]`."""
    _check_equal_blocks(from_seq_length, to_seq_length, from_block_size, to_block_size)
    layout = block_layout.layout_from_random_blocks(np.asarray(rand_attn)[None], from_block_size)
    seen = layout.multiplicity()[0] > 0
    return np.kron(seen, np.ones((from_block_size, to_block_size))).astype(np.float32)


def _check_equal_blocks(from_seq_length, to_seq_length, from_block_size, to_block_size):
    if from_seq_length // from_block_size != to_seq_length // to_block_size:
        raise ValueError(
            "Expected as many query blocks as key blocks, received "
            f"{from_seq_length} / {from_block_size} and {to_seq_length} / {to_block_size}."
        )
