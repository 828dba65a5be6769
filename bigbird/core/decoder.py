"""The decoder: one layer class, the stack of them, and their step by step use with a cache.

Axis letters: B batch, L document length, T target length, C capacity of the cache in positions,
K beams, D model, H heads, E per head.

    x = block(self-attention, x)      to the positions up to its own
    x = block(cross-attention, x)     to the encoded document
    x = block(feed-forward, x)

where a block is pre- or post-norm as in `encoder.py`. Attention is full. The stack has one
LayerNorm more: on its input if post-norm, on its output if pre-norm.

A decoder layer is an encoder layer with cross-attention in the middle. In a coupled model it shares
with its encoder layer everything that both have, as the same layer objects.

Source: Vaswani et al., arXiv:1706.03762; Rothe et al., arXiv:1907.12461 (shared weights).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import tensorflow as tf
import tf_keras as keras
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tf_keras.src.utils import control_flow_util

from bigbird.core.attention import MultiHeadedAttentionLayer, masked_softmax
from bigbird.core.config import BigBirdConfig
from bigbird.core.encoder import EncoderLayer, recomputed_as_configured
from bigbird.core.layers import LayerNorm, build_in_scope, gelu, get_activation, join_heads
from bigbird.core.recompute_grad import RecomputingDropout, add_gradient_recomputation
from bigbird.core.streaming import size

__all__ = [
    "DecoderLayer",
    "DecoderStack",
    "PostnormDecoderLayer",
    "PrenormDecoderLayer",
    "add_gradient_recomputation",
]

# What an encoder layer is configured with and a decoder layer is not.
_ENCODER_ONLY = (
    "attention_type",
    "num_rand_blocks",
    "seq_length",
    "block_size",
    "seed",
    "pattern_length",
    "max_position_embeddings",
    "pattern",
    "sparse_attention_dropout",
)


class KeysValues(NamedTuple):
    """Keys and values of one attention layer: `[B, H, L, E]` of a document, or a cache."""

    key: tf.Tensor
    value: tf.Tensor


class DecoderLayer(EncoderLayer):
    """Self-attention, cross-attention and feed-forward, each with dropout, residual, LayerNorm.

    The equations are in this module's docstring.
    """

    def __init__(
        self,
        hidden_size: int = 768,
        intermediate_size: int = 3072,
        intermediate_act_fn=gelu,
        attention_probs_dropout_prob: float = 0.0,
        hidden_dropout_prob: float = 0.1,
        initializer_range: float = 0.02,
        num_attention_heads: int = 12,
        use_bias: bool = True,
        name: str | None = None,
        norm_type: str = "postnorm",
        recompute_attention: bool = False,
        **kwargs,
    ):
        """Creates the layer.

        Args:
          use_bias: of the attention's projections; the feed-forward always has biases.
          recompute_attention: whether the backward pass recomputes the attention blocks.

        Raises:
          ValueError: for an unknown norm type.
        """
        super().__init__(
            "original_full",
            hidden_size,
            intermediate_size,
            intermediate_act_fn,
            attention_probs_dropout_prob,
            hidden_dropout_prob,
            initializer_range,
            num_attention_heads,
            use_bias=use_bias,
            name=name,
            norm_type=norm_type,
            recompute_attention=recompute_attention,
            **kwargs,
        )
        scope = self.name
        self.cross_attention = MultiHeadedAttentionLayer(
            "original_full",
            num_attention_heads,
            hidden_size // num_attention_heads,
            attention_probs_dropout_prob=attention_probs_dropout_prob,
            initializer_range=initializer_range,
            use_bias=use_bias,
            name=f"{scope}/attention/encdec",
            dtype=self.dtype_policy,
        )
        self.cross_output = self._dense("attention/encdec_output/dense", hidden_size, use_bias)
        self.cross_dropout = RecomputingDropout(
            hidden_dropout_prob,
            name=f"{scope}/attention/encdec_output/dropout",
            dtype=self.dtype_policy,
        )
        place = "encdec" if norm_type == "prenorm" else "encdec_output"
        self.cross_norm = self._norm(f"attention/{place}/LayerNorm")

    def share_weights(self, encoder_layer: EncoderLayer):
        """Takes over the sublayers of an encoder layer; call it before the layer is built."""
        for name in ("attention_output", "attention_norm", "intermediate", "output_dense"):
            setattr(self, name, getattr(encoder_layer, name))
        self.output_norm = encoder_layer.output_norm
        for name in ("query", "key", "value"):
            setattr(self.attention, name, getattr(encoder_layer.attention, name))

    def build(self, input_shape):
        hidden_shape = [*input_shape[:-1], self.hidden_size]
        for layer in (self.cross_attention, self.cross_output, self.cross_norm):
            build_in_scope(layer, hidden_shape)
        super().build(input_shape)

    def call(
        self,
        layer_input,
        encoder_outputs,
        self_attention_mask=None,
        attention_mask=None,
        training=None,
    ):
        """Transforms all positions of the targets, `[B, T, D]`, at once.

        Args:
          encoder_outputs: `[B, L, D]`.
          self_attention_mask: boolean, broadcastable to `[B, 1, T, T]`; True = attend.
          attention_mask: boolean `[B, L]` or `[B, 1, 1, L]`, True = a real token of the document.
        """
        attend = self._perhaps_recomputed(self._attention_block)
        attend_to_document = self._perhaps_recomputed(self._cross_attention_block)
        hidden = attend(layer_input, self_attention_mask, training)
        hidden = attend_to_document(hidden, encoder_outputs, attention_mask, training)
        return self._feed_forward_block(hidden, training)

    def _cross_attention_block(self, hidden, encoder_outputs, mask, training):
        inner = self._before(self.cross_norm, hidden)
        inner = join_heads(self.cross_attention(inner, encoder_outputs, mask, training=training))
        inner = self.cross_dropout(self.cross_output(inner), training=training)
        return self._after(self.cross_norm, hidden, inner)

    def step(self, hidden, beams, position, cache, visible, document, document_mask):
        """Transforms one position of every beam, `[B·K, D]`, without dropout.

        Args:
          beams: K.
          position: int32 scalar.
          cache: `KeysValues` of the positions before, `[B, H, C, K, E]`.
          visible: boolean, broadcastable to `[B, 1, K, C·K]`: what of the cache a beam sees.
          document: `KeysValues` of the cross-attention.
          document_mask: boolean `[B, 1, 1, L]`.

        Returns:
          `(hidden [B·K, D], cache)`.
        """
        inner = self._before(self.attention_norm, hidden)
        new = self.attention.keys_and_values(inner, beams)
        cache = KeysValues(*map(functools.partial(write_position, position), cache, new))
        query = self.attention.queries(inner, beams)
        context = _attend(query, *(_join_positions_and_beams(x) for x in cache), visible)
        hidden = self._after(self.attention_norm, hidden, self.attention_output(_rows(context)))

        inner = self._before(self.cross_norm, hidden)
        query = self.cross_attention.queries(inner, beams)
        context = _attend(query, *document, document_mask)
        hidden = self._after(self.cross_norm, hidden, self.cross_output(_rows(context)))
        return self._feed_forward_block(hidden, training=False), cache

    def get_config(self):
        config = super().get_config()
        return {key: value for key, value in config.items() if key not in _ENCODER_ONLY}


class PrenormDecoderLayer(DecoderLayer):
    """`DecoderLayer` with `norm_type="prenorm"`, under its 2021 name."""

    def __init__(self, *args, **kwargs):
        kwargs["norm_type"] = "prenorm"
        super().__init__(*args, **kwargs)


class PostnormDecoderLayer(DecoderLayer):
    """`DecoderLayer` with `norm_type="postnorm"`, under its 2021 name."""

    def __init__(self, *args, **kwargs):
        kwargs["norm_type"] = "postnorm"
        super().__init__(*args, **kwargs)


class DecoderStack(keras.layers.Layer):
    """The layers of a decoder and its extra LayerNorm."""

    def __init__(self, params, encoder=None, name: str | None = None, **kwargs):
        """Creates the stack from a `BigBirdConfig` or a dict of the same keys.

        Args:
          encoder: the `EncoderStack` to share weights with where `couple_encoder_decoder`.

        Raises:
          ValueError: for a coupled decoder without an encoder.
        """
        self.config = BigBirdConfig.from_params(params)
        coupled = self.config.couple_encoder_decoder
        if coupled and encoder is None:
            raise ValueError(
                "couple_encoder_decoder=True: pass the EncoderStack whose weights the decoder "
                "shares, DecoderStack(params, encoder)."
            )
        # The variables that a coupled decoder has of its own stand beside those it shares.
        place = encoder.name if coupled else f"{self.config.scope}/decoder"
        super().__init__(name=name or place, **kwargs)
        self.decoder_layers = [
            self._decoder_layer(index) for index in range(self.config.decoder_depth)
        ]
        if coupled:
            for layer, encoder_layer in zip(
                self.decoder_layers, encoder.encoder_layers, strict=True
            ):
                layer.share_weights(encoder_layer)
            self.layer_norm = encoder.layer_norm
        else:
            self.layer_norm = LayerNorm(
                self.config.layer_norm_epsilon,
                name=f"{self.name}/LayerNorm",
                dtype=self.dtype_policy,
            )

    def _decoder_layer(self, index):
        config = self.config
        layer_class = recomputed_as_configured(DecoderLayer, config, index)
        return layer_class(
            config.hidden_size,
            config.intermediate_size,
            get_activation(config.hidden_act),
            config.attention_probs_dropout_prob,
            config.hidden_dropout_prob,
            config.initializer_range,
            config.num_attention_heads,
            config.use_bias,
            name=f"{self.name}/layer_{index}",
            dtype=self.dtype_policy,
            norm_type=config.norm_type,
            recompute_attention=config.checkpointing_policy == "attention",
            layer_norm_epsilon=config.layer_norm_epsilon,
        )

    def build(self, input_shape):
        hidden_shape = [None, None, self.config.hidden_size]
        for layer in (*self.decoder_layers, self.layer_norm):
            build_in_scope(layer, hidden_shape)
        self.built = True

    def call(
        self,
        decoder_inputs,
        self_attention_mask,
        encoder_outputs,
        encoder_mask,
        training=None,
    ):
        """Decodes all positions of known targets at once.

        Args:
          decoder_inputs: `[B, T, D]`.
          self_attention_mask: boolean, broadcastable to `[B, 1, T, T]`; None is causal.
          encoder_outputs: `[B, L, D]`.
          encoder_mask: boolean `[B, L]`, True = a real token of the document.

        Returns:
          `[B, T, D]`.
        """
        if self_attention_mask is None:
            self_attention_mask = causal_mask(tf.shape(decoder_inputs)[1])
        hidden = self._normalized_if("postnorm", decoder_inputs)
        for layer in self.decoder_layers:
            hidden = layer(
                hidden, encoder_outputs, self_attention_mask, encoder_mask, training=training
            )
        return self._normalized_if("prenorm", hidden)

    def read_document(self, encoder_outputs):
        """Projects `[B, L, D]` to the keys and values of every layer's cross-attention."""
        length = size(encoder_outputs, 1)
        return [
            KeysValues(*layer.cross_attention.keys_and_values(encoder_outputs, length))
            for layer in self.decoder_layers
        ]

    def empty_cache(self, batch_size, beams):
        """Returns a cache without any position, `[B, H, 0, K, E]`, for every layer."""
        config = self.config
        shape = [batch_size, config.num_attention_heads, 0, beams, config.head_size]
        empty = tf.zeros(shape, self.compute_dtype)
        return [KeysValues(empty, empty) for _ in self.decoder_layers]

    def step(self, hidden, beams, position, cache, visible, document, document_mask):
        """Decodes one position of every beam, `[B·K, D]`; arguments as in `DecoderLayer.step`.

        Args:
          cache, document: lists with one entry per layer.
          visible: boolean `[B or 1, K or 1, C, K]`.
          document_mask: boolean `[B, L]`.

        Returns:
          `(hidden [B·K, D], cache)`.
        """
        visible = tf.reshape(visible, [tf.shape(visible)[0], 1, visible.shape[1], -1])
        document_mask = document_mask[:, tf.newaxis, tf.newaxis, :]
        hidden = self._normalized_if("postnorm", hidden)
        written = []
        for layer, past, keys_values in zip(self.decoder_layers, cache, document, strict=True):
            hidden, past = layer.step(
                hidden, beams, position, past, visible, keys_values, document_mask
            )
            written.append(past)
        return self._normalized_if("prenorm", hidden), written

    def _normalized_if(self, norm_type, hidden):
        return self.layer_norm(hidden) if self.config.norm_type == norm_type else hidden

    def get_config(self):
        return {**super().get_config(), "params": self.config.to_dict()}


def causal_mask(length):
    """Boolean `[1, 1, T, T]`: a position sees itself and those before it."""
    positions = tf.range(length)
    return (positions[:, tf.newaxis] >= positions)[tf.newaxis, tf.newaxis]


def write_position(position, cache, new):
    """Writes `[B, H, K, E]` into `[B, H, C, K, E]` at one position, in place.

    No single operation does so both under XLA and without it: a scatter copies the whole cache
    where XLA does not compile it.
    """
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        return gen_xla_ops.xla_dynamic_update_slice(
            cache, new[:, :, tf.newaxis], tf.stack([0, 0, position, 0, 0])
        )
    begin, end = (tf.stack([0, 0, p, 0, 0]) for p in (position, position + 1))
    all_but_position = 0b11011
    return tf.raw_ops.TensorStridedSliceUpdate(
        input=cache,
        begin=begin,
        end=end,
        strides=[1] * 5,
        value=new[:, :, tf.newaxis],
        begin_mask=all_but_position,
        end_mask=all_but_position,
    )


def _join_positions_and_beams(cache):
    """`[B, H, C, K, E]` -> `[B, H, C·K, E]`."""
    shape = tf.shape(cache)
    return tf.reshape(cache, [shape[0], cache.shape[1], -1, cache.shape[4]])


def _attend(query, keys, values, mask):
    """Attention of the few queries `[B, H, K, E]` of a step.

    On a CPU a product of a few rows with a matrix takes several times as long as one of each row by
    itself, hence the axis of size 1.

    Args:
      keys, values: `[B, H, S, E]`.
      mask: boolean, broadcastable to `[B, H, K, S]`.
    """
    query *= tf.cast(query.shape[-1] ** -0.5, query.dtype)
    scores = tf.matmul(query[:, :, :, tf.newaxis], keys[:, :, tf.newaxis], transpose_b=True)
    probabilities = masked_softmax(tf.cast(scores, tf.float32), mask[:, :, :, tf.newaxis])
    probabilities = tf.cast(probabilities, values.dtype)
    return tf.squeeze(tf.matmul(probabilities, values[:, :, tf.newaxis]), axis=3)


def _rows(context):
    """`[B, H, K, E]` -> `[B·K, D]`."""
    return tf.reshape(
        tf.transpose(context, [0, 2, 1, 3]), [-1, context.shape[1] * context.shape[3]]
    )
