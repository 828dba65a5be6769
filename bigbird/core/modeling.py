"""The models: `BertModel`, an encoder with a pooler. Start reading here.

Axis letters, the same in every module: B batch, L length, D model width, H heads, E width of a
head, N blocks, S block size, R random blocks, V vocabulary.

    input_ids [B, L] ──> TransformerEmbedding ──> EncoderStack ──> sequence_output [B, L, D]
          │                 (layers.py)           (encoder.py)            │
          └── id ≠ pad ──> mask [B, L] ──────────────┘              first token
                                                                          │
                                                  pooler ──> pooled_output [B, D]

Reading order: `config.py` (what a model is made of), this file, `layers.py` (embeddings),
`encoder.py` (the layer and its stack), `attention.py` (who attends to whom, and how),
`block_layout.py` (which blocks meet), `recompute_grad.py` (trading time for memory).
"""

from __future__ import annotations

import tensorflow as tf
import tf_keras as keras

from bigbird.core.config import BigBirdConfig
from bigbird.core.encoder import EncoderStack
from bigbird.core.layers import TransformerEmbedding, build_in_scope, create_initializer


class BertModel(keras.Model):
    """Encoder of documents: embeddings, encoder stack and a pooler over the first token.

    pooled = tanh(W sequence_output[0] + b)

    All shapes follow from the configuration, so the variables exist as soon as the model does,
    under their 2021 names (`bert/encoder/layer_0/attention/self/query/kernel`, …).

    Example:
      >>> model = BertModel({"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000})
      >>> sequence_output, pooled_output = model(tf.ones([2, 700], tf.int32))

    Source: Devlin et al., arXiv:1810.04805; Zaheer et al., arXiv:2007.14062.
    """

    def __init__(self, params, name: str | None = None, **kwargs):
        """Creates the model from a `BigBirdConfig` or a dict of the same keys (left unchanged)."""
        config = BigBirdConfig.from_params(params)
        scope = config.scope
        super().__init__(name=name or scope, **kwargs)
        self.config = config
        self.embeddings = TransformerEmbedding(
            config.vocab_size,
            config.hidden_size,
            config.max_position_embeddings,
            config.type_vocab_size,
            config.hidden_dropout_prob,
            config.initializer_range,
            config.rescale_embedding,
            name=f"{scope}/embeddings",
        )
        self.encoder = EncoderStack(config)
        self.pooler = keras.layers.Dense(
            config.hidden_size,
            activation="tanh",
            kernel_initializer=create_initializer(config.initializer_range),
            name=f"{scope}/pooler/dense",
        )
        self.build([None, None])

    def build(self, input_shape):
        build_in_scope(self.embeddings, input_shape)
        hidden_shape = [*input_shape, self.config.hidden_size]
        build_in_scope(self.encoder, hidden_shape)
        build_in_scope(self.pooler, [input_shape[0], self.config.hidden_size])
        self.built = True

    def call(self, input_ids, token_type_ids=None, training=None):
        """Encodes token ids.

        Args:
          input_ids: int `[B, L]`, L at most `max_encoder_length`; `pad_token_id` is padding.
          token_type_ids: int `[B, L]`; all 0 where None.

        Returns:
          `(sequence_output [B, L, D], pooled_output [B, D])`.

        Raises:
          ValueError: for a static length beyond `max_encoder_length`.
        """
        length = input_ids.shape[1]
        if length is not None and length > self.config.max_encoder_length:
            raise ValueError(
                f"The input has {length} tokens and the model is built for "
                f"max_encoder_length={self.config.max_encoder_length}: cut the input or build a "
                "longer model."
            )
        mask = tf.not_equal(input_ids, self.config.pad_token_id)
        hidden = self.embeddings(input_ids, token_type_ids, training=training)
        sequence_output = self.encoder(hidden, mask, training=training)
        pooled_output = self.pooler(sequence_output[:, 0])
        return sequence_output, pooled_output

    def get_config(self):
        return {"params": self.config.to_dict(), "name": self.name}
