"""The heads of pretraining: which words were masked, and whether two segments follow each other.

Axis letters: B batch, L length, P predictions of a sequence, D model, V vocabulary.

Source: Devlin et al., arXiv:1810.04805, section 3.1.
"""

from __future__ import annotations

import tensorflow as tf
import tf_keras as keras

from bigbird.core.layers import (
    LAYER_NORM_EPSILON,
    LayerNorm,
    build_in_scope,
    create_initializer,
    get_activation,
)

# Keeps the mean over no masked word at 0.
WEIGHT_EPSILON = 1e-5


class MaskedLMLayer(keras.layers.Layer):
    """Predicts words through the transposed word table.

    log p = log softmax(LN(act(W x + b)) E^T + c)      E: the word table `[V, D]`

    loss = sum(weight · -log p[label]) / (sum(weight) + 1e-5)
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        embeder,
        initializer=None,
        activation_fn=None,
        name: str = "cls/predictions",
        layer_norm_epsilon: float = LAYER_NORM_EPSILON,
        **kwargs,
    ):
        """Creates the layer and its variables, whose shapes are known.

        Args:
          embeder: the built embedding layer, whose `word_embeddings` are the output weights too.
        """
        super().__init__(name=name, **kwargs)
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.embeder = embeder
        self.initializer = initializer
        self.activation_fn = activation_fn
        self.layer_norm_epsilon = layer_norm_epsilon
        self.transform = keras.layers.Dense(
            hidden_size,
            activation=get_activation(activation_fn),
            kernel_initializer=initializer or create_initializer(),
            name=f"{name}/transform/dense",
            dtype=self.dtype_policy,
        )
        self.transform_norm = LayerNorm(
            layer_norm_epsilon, name=f"{name}/transform/LayerNorm", dtype=self.dtype_policy
        )
        build_in_scope(self, [None, None, hidden_size])

    def build(self, input_shape):
        hidden_shape = [None, None, self.hidden_size]
        build_in_scope(self.transform, hidden_shape)
        build_in_scope(self.transform_norm, hidden_shape)
        self.output_bias = self.add_weight("output_bias", [self.vocab_size], initializer="zeros")
        self.built = True

    def logits(self, hidden):
        """`[B, P, D]` -> `[B, P, V]` in the compute dtype."""
        hidden = self.transform_norm(self.transform(hidden))
        words = tf.cast(self.embeder.word_embeddings, hidden.dtype)
        return tf.einsum("BPD,VD->BPV", hidden, words) + tf.cast(self.output_bias, hidden.dtype)

    def call(self, input_tensor, label_ids=None, label_weights=None, masked_lm_positions=None):
        """Predicts words.

        Args:
          input_tensor: `[B, L, D]`.
          label_ids: int `[B, P]`; without them the loss is 0.
          label_weights: float `[B, P]`, 0 where there is nothing to predict; all 1 where None.
          masked_lm_positions: int `[B, P]`, the places to predict; all of them where None (P = L).

        Returns:
          `(loss [], log_probs float32 [B, P, V])`.
        """
        if masked_lm_positions is not None:
            input_tensor = tf.gather(input_tensor, masked_lm_positions, batch_dims=1)
        log_probs = tf.nn.log_softmax(tf.cast(self.logits(input_tensor), tf.float32))
        if label_ids is None:
            return tf.zeros([]), log_probs
        losses = -tf.gather(log_probs, tf.cast(label_ids, tf.int32), axis=2, batch_dims=2)
        if label_weights is None:
            label_weights = tf.ones_like(losses)
        label_weights = tf.cast(label_weights, tf.float32)
        total = tf.reduce_sum(label_weights * losses)
        return total / (tf.reduce_sum(label_weights) + WEIGHT_EPSILON), log_probs

    def get_config(self):
        return {
            **super().get_config(),
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "embeder": keras.saving.serialize_keras_object(self.embeder),
            "initializer": self.initializer,
            "activation_fn": self.activation_fn,
            "layer_norm_epsilon": self.layer_norm_epsilon,
        }

    @classmethod
    def from_config(cls, config):
        embeder = keras.saving.deserialize_keras_object(config["embeder"])
        build_in_scope(embeder, [None, None])
        return cls(**{**config, "embeder": embeder})


class NSPLayer(keras.layers.Layer):
    """Tells whether the second segment follows the first: 0 it does, 1 it is a random one.

    log p = log softmax(x W^T + b)          loss = -mean_B log p[label]
    """

    def __init__(
        self, hidden_size: int, initializer=None, name: str = "cls/seq_relationship", **kwargs
    ):
        """Creates the layer and its variables, whose shapes are known."""
        super().__init__(name=name, **kwargs)
        self.hidden_size = hidden_size
        self.initializer = initializer
        build_in_scope(self, [None, hidden_size])

    def build(self, input_shape):
        self.output_weights = self.add_weight(
            "output_weights",
            [2, self.hidden_size],
            initializer=self.initializer or create_initializer(),
        )
        self.output_bias = self.add_weight("output_bias", [2], initializer="zeros")
        self.built = True

    def logits(self, hidden):
        """`[B, D]` -> `[B, 2]` in the compute dtype."""
        return tf.matmul(hidden, self.output_weights, transpose_b=True) + self.output_bias

    def call(self, input_tensor, next_sentence_labels=None):
        """Classifies pooled outputs `[B, D]`.

        Args:
          next_sentence_labels: int `[B]` or `[B, 1]`; without them the loss is 0.

        Returns:
          `(loss [], log_probs float32 [B, 2])`.
        """
        log_probs = tf.nn.log_softmax(tf.cast(self.logits(input_tensor), tf.float32))
        if next_sentence_labels is None:
            return tf.zeros([]), log_probs
        labels = tf.cast(tf.reshape(next_sentence_labels, [-1]), tf.int32)
        return -tf.reduce_mean(tf.gather(log_probs, labels, axis=1, batch_dims=1)), log_probs

    def get_config(self):
        return {
            **super().get_config(),
            "hidden_size": self.hidden_size,
            "initializer": self.initializer,
        }
