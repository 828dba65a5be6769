"""Small layers and functions that encoder and decoder share: embeddings, activations, scopes.

Axis letters: B batch, L length, D model, H heads, E per head, V vocabulary.
"""

from __future__ import annotations

import tensorflow as tf
import tf_keras as keras

from bigbird.core.recompute_grad import RecomputingDropout
from bigbird.core.streaming import size

# The 2021 toolkit's LayerNorm epsilon; checkpoints were trained with it.
LAYER_NORM_EPSILON = 1e-12


def create_initializer(initializer_range: float = 0.02):
    """Returns the truncated normal initializer of standard deviation `initializer_range`."""
    return keras.initializers.TruncatedNormal(stddev=initializer_range)


@keras.saving.register_keras_serializable("bigbird")
def gelu(x):
    """The tanh form of the Gaussian error linear unit (Hendrycks & Gimpel, arXiv:1606.08415).

    0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), the form that the 2021 checkpoints use.
    """
    return tf.nn.gelu(x, approximate=True)


@keras.saving.register_keras_serializable("bigbird")
def gelu_exact(x):
    """The Gaussian error linear unit itself, 0.5 x (1 + erf(x / sqrt(2)))."""
    return tf.nn.gelu(x, approximate=False)


_ACTIVATIONS = {
    "gelu": gelu,
    "gelu_exact": gelu_exact,
    "relu": tf.nn.relu,
    "tanh": tf.nn.tanh,
    "swish": tf.nn.silu,
    "linear": None,
}


def get_activation(activation_string):
    """Returns the activation function of a name; functions and None pass through.

    Raises:
      ValueError: for an unknown name.
    """
    if activation_string is None or callable(activation_string):
        return activation_string
    name = activation_string.lower()
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"hidden_act={activation_string!r}: expected one of {', '.join(_ACTIVATIONS)}."
        )
    return _ACTIVATIONS[name]


def build_in_scope(layer, input_shape):
    """Builds a layer, its variables named `<layer.name>/<variable>` wherever that happens.

    Layers are named by their full path (`bert/encoder/layer_0/output/dense`), and the trailing
    slash makes the scope absolute, so that a variable bears its 2021 checkpoint name.
    """
    if not layer.built:
        with tf.name_scope(f"{layer.name}/"):
            layer.build(input_shape)


class LayerNorm(keras.layers.LayerNormalization):
    """LayerNorm (Ba et al., arXiv:1607.06450) of `[B, L, D]` or `[B, D]`; 2021's epsilon."""

    def __init__(self, epsilon: float = LAYER_NORM_EPSILON, **kwargs):
        super().__init__(epsilon=epsilon, **kwargs)

    def call(self, inputs):
        if inputs.shape.rank == 2:
            return super().call(inputs[:, tf.newaxis])[:, 0]
        return super().call(inputs)


def join_heads(tensor):
    """`[B, L, H, E]` -> `[B, L, D]`."""
    return tf.reshape(tensor, [-1, size(tensor, 1), tensor.shape[2] * tensor.shape[3]])


def pad_length(tensor, multiple: int):
    """Pads axis 1 of `[B, L, …]` with zeros (or False) to a multiple of `multiple`."""
    paddings = [[0, 0]] * tensor.shape.rank
    paddings[1] = [0, -size(tensor, 1) % multiple]
    return tf.pad(tensor, paddings)


class TransformerEmbedding(keras.layers.Layer):
    """Sum of word, token type and position embeddings, with dropout.

    x = word[id] (· sqrt(D) where `rescale`) + type[token type] + position[0 … L-1]

    Source: Devlin et al., arXiv:1810.04805, section 3; figure 2.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        max_position_embeddings: int,
        type_vocab_size: int | None = None,
        dropout_rate: float = 0.0,
        initializer_range: float = 0.02,
        rescale: bool = False,
        name: str = "embeddings",
        **kwargs,
    ):
        """Creates the layer; `type_vocab_size=None` leaves token types out."""
        super().__init__(name=name, **kwargs)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.max_position_embeddings = max_position_embeddings
        self.type_vocab_size = type_vocab_size
        self.dropout_rate = dropout_rate
        self.initializer_range = initializer_range
        self.rescale = rescale
        self.dropout = RecomputingDropout(
            dropout_rate, name=f"{name}/dropout", dtype=self.dtype_policy
        )

    def build(self, input_shape):
        def table(name, rows):
            # An initializer of its own: Keras gives equal values to two uses of one.
            initializer = create_initializer(self.initializer_range)
            return self.add_weight(name, [rows, self.hidden_size], initializer=initializer)

        self.word_embeddings = table("word_embeddings", self.vocab_size)
        if self.type_vocab_size is not None:
            self.token_type_embeddings = table("token_type_embeddings", self.type_vocab_size)
        self.position_embeddings = table("position_embeddings", self.max_position_embeddings)
        self.built = True

    def call(
        self,
        input_ids,
        token_type_ids=None,
        training=None,
        first_position=0,
        position_embeddings=None,
    ):
        """Embeds ids `[B, L]` as `[B, L, D]`.

        Args:
          first_position: int or int32 scalar, the position of the first id.
          position_embeddings: a table `[positions, D]` to use in place of the layer's.

        Raises:
          ValueError: for a static length beyond the position table.
        """
        length = input_ids.shape[1]
        if length is None:
            length = tf.shape(input_ids)[1]
        elif length > self.max_position_embeddings:
            raise ValueError(
                f"The input has {length} tokens and the position table "
                f"{self.max_position_embeddings}: cut the input or enlarge "
                "max_position_embeddings."
            )
        hidden = tf.gather(self.word_embeddings, input_ids)
        if self.rescale:
            hidden *= tf.cast(self.hidden_size, hidden.dtype) ** 0.5
        if self.type_vocab_size is not None:
            hidden += self._token_types(token_type_ids)
        positions = self.position_embeddings
        if position_embeddings is not None:
            positions = position_embeddings
        hidden += tf.slice(positions, [first_position, 0], [length, self.hidden_size])
        return self.dropout(hidden, training=training)

    def _token_types(self, token_type_ids):
        if token_type_ids is None:
            return self.token_type_embeddings[0]
        # The table has a couple of rows: a product is faster than a gather's scattered gradient.
        one_hot = tf.one_hot(token_type_ids, self.type_vocab_size, dtype=self.compute_dtype)
        return tf.einsum("BLT,TD->BLD", one_hot, self.token_type_embeddings)

    def get_config(self):
        return {
            **super().get_config(),
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "max_position_embeddings": self.max_position_embeddings,
            "type_vocab_size": self.type_vocab_size,
            "dropout_rate": self.dropout_rate,
            "initializer_range": self.initializer_range,
            "rescale": self.rescale,
        }


class FirstTokenTransform(keras.layers.Layer):
    """A layer between an encoder and a classifier, in the pooler's place.

    y = act(W drop(x_0) + b), where x_0 is the first token's vector

    It is the first half of the classification head of Hugging Face's BigBird.
    """

    def __init__(
        self,
        hidden_size: int,
        activation=gelu,
        dropout_rate: float = 0.0,
        initializer_range: float = 0.02,
        name: str = "classifier/transform",
        **kwargs,
    ):
        """Creates the layer and its variables, whose shapes are known."""
        super().__init__(name=name, **kwargs)
        self.hidden_size = hidden_size
        self.activation = activation
        self.dropout_rate = dropout_rate
        self.initializer_range = initializer_range
        self.dropout = RecomputingDropout(
            dropout_rate, name=f"{name}/dropout", dtype=self.dtype_policy
        )
        self.dense = keras.layers.Dense(
            hidden_size,
            activation=get_activation(activation),
            kernel_initializer=create_initializer(initializer_range),
            name=name,
            dtype=self.dtype_policy,
        )
        build_in_scope(self, [None, None, hidden_size])

    def build(self, input_shape):
        build_in_scope(self.dense, [None, self.hidden_size])
        self.built = True

    def call(self, sequence_output, training=None):
        """`[B, L, D]` -> `[B, D]`."""
        return self.dense(self.dropout(sequence_output[:, 0], training=training))

    def get_config(self):
        return {
            **super().get_config(),
            "hidden_size": self.hidden_size,
            "activation": self.activation,
            "dropout_rate": self.dropout_rate,
            "initializer_range": self.initializer_range,
        }
