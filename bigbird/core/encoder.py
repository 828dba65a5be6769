"""The encoder: one layer class in pre- and post-norm form, and the stack of them.

Axis letters: B batch, L length, D model, H heads, E per head.

    post-norm   x = LN(x + drop(W_o attn(x)))       x = LN(x + drop(W_2 act(W_1 x)))
    pre-norm    x = x + drop(W_o attn(LN x))        x = x + drop(W_2 act(W_1 LN x))

The stack has one LayerNorm more: on its input if post-norm, on its output if pre-norm.

Source: Vaswani et al., arXiv:1706.03762; Xiong et al., arXiv:2002.04745 (pre-norm).
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf
import tf_keras as keras

from bigbird.core import block_layout
from bigbird.core.attention import MultiHeadedAttentionLayer
from bigbird.core.config import NORM_TYPES, BigBirdConfig
from bigbird.core.feed_forward import feed_forward
from bigbird.core.layers import (
    LAYER_NORM_EPSILON,
    LayerNorm,
    build_in_scope,
    create_initializer,
    gelu,
    get_activation,
    join_heads,
    pad_length,
)
from bigbird.core.recompute_grad import (
    RecomputingDropout,
    add_gradient_recomputation,
    recompute_grad,
)

__all__ = [
    "EncoderLayer",
    "EncoderStack",
    "PostnormEncoderLayer",
    "PrenormEncoderLayer",
    "add_gradient_recomputation",
]


class EncoderLayer(keras.layers.Layer):
    """Self-attention and feed-forward, each with dropout, residual and LayerNorm.

    The equations of both norm types are in this module's docstring.
    """

    def __init__(
        self,
        attention_type: str,
        hidden_size: int = 768,
        intermediate_size: int = 3072,
        intermediate_act_fn=gelu,
        attention_probs_dropout_prob: float = 0.0,
        hidden_dropout_prob: float = 0.1,
        initializer_range: float = 0.02,
        num_attention_heads: int = 12,
        num_rand_blocks: int = 3,
        seq_length: int = 1024,
        block_size: int = 64,
        use_bias: bool = True,
        seed: int | None = None,
        name: str | None = None,
        norm_type: str = "postnorm",
        pattern_length: str = "model",
        max_position_embeddings: int = block_layout.BUILT_FOR_LENGTH,
        recompute_attention: bool = False,
        pattern=block_layout.BIGBIRD_2021,
        sparse_attention_dropout: bool = False,
        layer_norm_epsilon: float = LAYER_NORM_EPSILON,
        **kwargs,
    ):
        """Creates the layer.

        Args:
          seq_length: the length the attention pattern is built for.
          use_bias: of the attention's projections; the feed-forward always has biases.
          seed: of the random blocks.
          recompute_attention: whether the backward pass recomputes the attention block.
          pattern, sparse_attention_dropout: as of `MultiHeadedAttentionLayer`.

        Raises:
          ValueError: for an unknown norm type.
        """
        super().__init__(name=name, **kwargs)
        if norm_type not in NORM_TYPES:
            raise ValueError(f"norm_type={norm_type!r}: expected one of {', '.join(NORM_TYPES)}.")
        self.attention_type = attention_type
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.intermediate_act_fn = intermediate_act_fn
        self.attention_probs_dropout_prob = attention_probs_dropout_prob
        self.hidden_dropout_prob = hidden_dropout_prob
        self.initializer_range = initializer_range
        self.num_attention_heads = num_attention_heads
        self.num_rand_blocks = num_rand_blocks
        self.seq_length = seq_length
        self.block_size = block_size
        self.use_bias = use_bias
        self.seed = seed
        self.norm_type = norm_type
        self.pattern_length = pattern_length
        self.max_position_embeddings = max_position_embeddings
        self.recompute_attention = recompute_attention
        self.layer_norm_epsilon = layer_norm_epsilon

        scope = self.name
        self.attention = MultiHeadedAttentionLayer(
            attention_type,
            num_attention_heads,
            hidden_size // num_attention_heads,
            num_rand_blocks,
            seq_length,
            seq_length,
            block_size,
            block_size,
            attention_probs_dropout_prob,
            initializer_range,
            use_bias,
            seed,
            name=f"{scope}/attention/self",
            pattern_length=pattern_length,
            max_position_embeddings=max_position_embeddings,
            pattern=pattern,
            sparse_attention_dropout=sparse_attention_dropout,
            dtype=self.dtype_policy,
        )
        self.attention_output = self._dense("attention/output/dense", hidden_size, use_bias)
        self.intermediate = self._dense(
            "intermediate/dense", intermediate_size, activation=get_activation(intermediate_act_fn)
        )
        self.output_dense = self._dense("output/dense", hidden_size)
        self.attention_dropout = RecomputingDropout(
            hidden_dropout_prob, name=f"{scope}/attention/output/dropout", dtype=self.dtype_policy
        )
        self.output_dropout = RecomputingDropout(
            hidden_dropout_prob, name=f"{scope}/output/dropout", dtype=self.dtype_policy
        )
        # The norms sit where 2021 checkpoints have them.
        if norm_type == "prenorm":
            self.attention_norm = self._norm("attention/self/LayerNorm")
            self.output_norm = self._norm("intermediate/LayerNorm")
        else:
            self.attention_norm = self._norm("attention/output/LayerNorm")
            self.output_norm = self._norm("output/LayerNorm")

    def _dense(self, path, units, use_bias=True, activation=None):
        return keras.layers.Dense(
            units,
            activation=activation,
            use_bias=use_bias,
            kernel_initializer=create_initializer(self.initializer_range),
            name=f"{self.name}/{path}",
            dtype=self.dtype_policy,
        )

    def _norm(self, path):
        return LayerNorm(
            self.layer_norm_epsilon, name=f"{self.name}/{path}", dtype=self.dtype_policy
        )

    def build(self, input_shape):
        hidden_shape = [*input_shape[:-1], self.hidden_size]
        inner_shape = [*input_shape[:-1], self.intermediate_size]
        for layer, shape in (
            (self.attention, hidden_shape),
            (self.attention_output, hidden_shape),
            (self.attention_norm, hidden_shape),
            (self.intermediate, hidden_shape),
            (self.output_dense, inner_shape),
            (self.output_norm, hidden_shape),
        ):
            build_in_scope(layer, shape)
        self.built = True

    def call(
        self,
        layer_input,
        attention_mask=None,
        band_mask=None,
        from_mask=None,
        to_mask=None,
        input_blocked_mask=None,
        training=None,
    ):
        """Transforms `[B, L, D]`.

        Args:
          attention_mask: boolean `[B, L]`, True = a real token. The five mask arguments of the
            2021 layers are understood too.
        """
        if to_mask is None:
            masks = attention_mask
        else:
            masks = [
                attention_mask,
                band_mask,
                from_mask,
                to_mask,
                input_blocked_mask,
                input_blocked_mask,
            ]
        attend = self._perhaps_recomputed(self._attention_block)
        hidden = attend(layer_input, masks, training)
        return self._feed_forward_block(hidden, training)

    def _perhaps_recomputed(self, attention_block):
        return recompute_grad(attention_block) if self.recompute_attention else attention_block

    def _attention_block(self, hidden, masks, training):
        inner = self._before(self.attention_norm, hidden)
        inner = join_heads(self.attention(inner, inner, masks, training=training))
        inner = self.attention_dropout(self.attention_output(inner), training=training)
        return self._after(self.attention_norm, hidden, inner)

    def _feed_forward_block(self, hidden, training):
        inner = self._before(self.output_norm, hidden)
        inner = feed_forward(inner, self.intermediate, self.output_dense)
        inner = self.output_dropout(inner, training=training)
        return self._after(self.output_norm, hidden, inner)

    def _before(self, norm, hidden):
        """What a block of the layer computes on."""
        return norm(hidden) if self.norm_type == "prenorm" else hidden

    def _after(self, norm, hidden, inner):
        """The residual around a block."""
        hidden = hidden + inner
        return hidden if self.norm_type == "prenorm" else norm(hidden)

    def get_config(self):
        return {
            **super().get_config(),
            "attention_type": self.attention_type,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "intermediate_act_fn": self.intermediate_act_fn,
            "attention_probs_dropout_prob": self.attention_probs_dropout_prob,
            "hidden_dropout_prob": self.hidden_dropout_prob,
            "initializer_range": self.initializer_range,
            "num_attention_heads": self.num_attention_heads,
            "num_rand_blocks": self.num_rand_blocks,
            "seq_length": self.seq_length,
            "block_size": self.block_size,
            "use_bias": self.use_bias,
            "seed": self.seed,
            "norm_type": self.norm_type,
            "pattern_length": self.pattern_length,
            "max_position_embeddings": self.max_position_embeddings,
            "pattern": dataclasses.asdict(self.attention.pattern),
            "sparse_attention_dropout": self.attention.sparse_attention_dropout,
            "recompute_attention": self.recompute_attention,
            "layer_norm_epsilon": self.layer_norm_epsilon,
        }


class PrenormEncoderLayer(EncoderLayer):
    """`EncoderLayer` with `norm_type="prenorm"`, under its 2021 name."""

    def __init__(self, attention_type, *args, **kwargs):
        kwargs["norm_type"] = "prenorm"
        super().__init__(attention_type, *args, **kwargs)


class PostnormEncoderLayer(EncoderLayer):
    """`EncoderLayer` with `norm_type="postnorm"`, under its 2021 name."""

    def __init__(self, attention_type, *args, **kwargs):
        kwargs["norm_type"] = "postnorm"
        super().__init__(attention_type, *args, **kwargs)


def recomputed_as_configured(layer_class, config, index):
    """Returns `layer_class`, recomputed whole if the config's policy says so of layer `index`.

    Raises:
      ValueError: for a policy that is still to be resolved.
    """
    recomputed = {
        "none": False,
        "attention": False,
        "full": True,
        "every_n": index % config.gradient_checkpointing_every_n == 0,
    }
    policy = config.checkpointing_policy
    if policy not in recomputed:
        raise ValueError(
            f"gradient_checkpointing_policy={policy!r} must be resolved before the model is "
            "built: expected none, full, every_n or attention."
        )
    return add_gradient_recomputation(layer_class) if recomputed[policy] else layer_class


class EncoderStack(keras.layers.Layer):
    """The layers of an encoder, its extra LayerNorm, and the padding to whole blocks.

    Input of any length up to the model's is padded to the block size, masked, and cropped back.
    """

    def __init__(self, params, name: str | None = None, **kwargs):
        """Creates the stack from a `BigBirdConfig` or a dict of the same keys."""
        self.config = BigBirdConfig.from_params(params)
        super().__init__(name=name or f"{self.config.scope}/encoder", **kwargs)
        self.encoder_layers = [
            self._encoder_layer(index) for index in range(self.config.num_hidden_layers)
        ]
        self.layer_norm = LayerNorm(
            self.config.layer_norm_epsilon, name=f"{self.name}/LayerNorm", dtype=self.dtype_policy
        )

    def _encoder_layer(self, index):
        config = self.config
        layer_class = recomputed_as_configured(EncoderLayer, config, index)
        return layer_class(
            config.attention_type,
            config.hidden_size,
            config.intermediate_size,
            get_activation(config.hidden_act),
            config.attention_probs_dropout_prob,
            config.hidden_dropout_prob,
            config.initializer_range,
            config.num_attention_heads,
            config.num_rand_blocks,
            config.max_encoder_length,
            config.block_size,
            config.use_bias,
            seed=index,
            name=f"{self.name}/layer_{index}",
            dtype=self.dtype_policy,
            norm_type=config.norm_type,
            pattern_length=config.pattern_length,
            max_position_embeddings=config.max_position_embeddings,
            pattern=config.pattern,
            sparse_attention_dropout=config.sparse_attention_dropout,
            recompute_attention=config.checkpointing_policy == "attention",
            layer_norm_epsilon=config.layer_norm_epsilon,
        )

    def build(self, input_shape):
        hidden_shape = [None, None, self.config.hidden_size]
        for layer in (*self.encoder_layers, self.layer_norm):
            build_in_scope(layer, hidden_shape)
        self.built = True

    def call(self, encoder_inputs, encoder_inputs_mask, training=None):
        """Encodes `[B, L, D]`.

        Args:
          encoder_inputs_mask: `[B, L]`, True or 1 = a real token.

        Returns:
          `[B, L, D]`; values at padding are unspecified.
        """
        length = tf.shape(encoder_inputs)[1]
        block_size = self.config.block_size
        hidden = pad_length(encoder_inputs, block_size)
        mask = pad_length(tf.cast(encoder_inputs_mask, tf.bool), block_size)
        if self.config.norm_type == "postnorm":
            hidden = self.layer_norm(hidden)
        for layer in self.encoder_layers:
            hidden = layer(hidden, mask, training=training)
        if self.config.norm_type == "prenorm":
            hidden = self.layer_norm(hidden)
        hidden = hidden[:, :length]
        hidden.set_shape(encoder_inputs.shape)
        return hidden

    def get_config(self):
        return {**super().get_config(), "params": self.config.to_dict()}
