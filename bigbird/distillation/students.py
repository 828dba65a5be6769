"""What a student or teacher must offer: hidden states and the head that turns them into logits.

Axis letters: B batch, L length, D model, V vocabulary.

The losses never see a model, and a model never forms logits `[B, L, V]`: a `LanguageModel` gives
its last hidden states and its head apart. Here are those of the toolkit's models and of any
functional model of tf_keras or Keras 3.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
import tf_keras as keras


class Head(NamedTuple):
    """The projection of hidden states to logits: z = cap · tanh(scale · (h W + b) / cap).

    Attributes:
      kernel: float `[D, V]`.
      bias: float `[V]`, or None.
      logit_scale, logit_softcap: as in `topk_kl`.
    """

    kernel: Any
    bias: Any = None
    logit_scale: float | None = None
    logit_softcap: float | None = None

    @property
    def vocab_size(self) -> int:
        """V, padding included."""
        return self.kernel.shape[1]

    def logits(self, hidden) -> tf.Tensor:
        """Hidden states `[…, D]` -> float32 `[…, V]`."""
        kernel = tf.cast(self.kernel, tf.float32)
        logits = tf.tensordot(tf.cast(hidden, tf.float32), kernel, axes=1)
        if self.bias is not None:
            logits += tf.cast(self.bias, tf.float32)
        if self.logit_scale is not None:
            logits *= self.logit_scale
        if self.logit_softcap is not None:
            logits = self.logit_softcap * tf.tanh(logits / self.logit_softcap)
        return logits


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A model as distillation sees it.

    Attributes:
      hidden_states: function of (features, training) that gives float `[B, L, D]`, L being that of
        the teacher's rows; `features` has `input_ids` `[B, L]`, and whatever else a batch has.
      head: function that gives the `Head`, called where gradients are recorded: what it makes of
        variables, such as a transposed table, is differentiated too.
      modules: the models and layers that own the variables.
    """

    hidden_states: Callable[[Mapping[str, tf.Tensor], bool], tf.Tensor]
    head: Callable[[], Head]
    modules: Sequence[Any]

    @property
    def weights(self) -> list[tf.Variable]:
        """All variables, each once, in the order of the modules."""
        return _distinct(variable for module in self.modules for variable in module.weights)

    @property
    def trainable_variables(self) -> list[tf.Variable]:
        """Those that are trained."""
        return _distinct(v for module in self.modules for v in module.trainable_variables)

    @property
    def vocab_size(self) -> int:
        """V of the head, padding included."""
        return self.head().vocab_size

    @property
    def width(self) -> int:
        """D of the hidden states that meet the head."""
        return self.head().kernel.shape[0]

    def fingerprint(self) -> str:
        """Tells weights apart: a SHA-256 over their shapes, types and bytes, in order."""
        digest = hashlib.sha256()
        for variable in self.weights:
            values = variable.numpy()
            digest.update(f"{values.dtype} {values.shape}".encode())
            digest.update(values.tobytes())
        return digest.hexdigest()


def masked_language_model(bert, predictions) -> LanguageModel:
    """A `BertModel` with a `MaskedLMLayer`.

    h = LN(act(W x + b)), logits = h Eᵀ + c, where E is the word table.
    """

    def hidden_states(features, training):
        sequence_output, _ = bert(
            features["input_ids"], features.get("token_type_ids"), training=training
        )
        return predictions.transform_norm(predictions.transform(sequence_output))

    def head():
        return Head(tf.transpose(bert.embeddings.word_embeddings), predictions.output_bias)

    return LanguageModel(hidden_states, head, (bert, predictions))


def sequence_to_sequence_model(transformer) -> LanguageModel:
    """A `TransformerModel`; the rows are those of `target_ids`."""

    def hidden_states(features, training):
        hidden, _ = transformer.hidden_states(
            features["input_ids"], features["target_ids"], training=training
        )
        return hidden

    return LanguageModel(hidden_states, lambda: Head(transformer.output_kernel), (transformer,))


def functional_model(
    model,
    head_layer: str | None = None,
    *,
    hidden_layer: str | None = None,
    input_names: Sequence[str] = ("input_ids",),
    logit_scale: float | None = None,
    logit_softcap: float | None = None,
) -> LanguageModel:
    """A functional or sequential model of tf_keras or Keras 3 (on TensorFlow), cut before its head.

    Args:
      model: token ids to logits `[B, L, V]`, or to hidden states if `hidden_layer` is given.
      head_layer: name of the layer that is the head: a dense layer without an activation, or the
        embedding layer of a tied head. The last layer where None.
      hidden_layer: name of the layer that gives the hidden states; what goes into the dense head
        where None. A tied head needs it.
      input_names: features that the model takes, in the order of its inputs.
      logit_scale, logit_softcap: what the model does behind the head.

    Raises:
      ValueError: for layers that are not there or are no head.
    """
    head_layer = model.layers[-1] if head_layer is None else _layer(model, head_layer)
    is_tied = hasattr(head_layer, "embeddings")
    if not is_tied and not hasattr(head_layer, "kernel"):
        raise ValueError(
            f"The head must be a dense or an embedding layer; received {head_layer.name}, a "
            f"{type(head_layer).__name__}. Name it by head_layer."
        )
    if not is_tied and getattr(head_layer.activation, "__name__", "") != "linear":
        raise ValueError(
            f"The head {head_layer.name} must give logits; it has the activation "
            f"{head_layer.activation.__name__}. Make it linear: the loss takes the softmax."
        )
    if is_tied and hidden_layer is None:
        raise ValueError(
            f"{head_layer.name} is an embedding: name the layer that gives the hidden states by "
            "hidden_layer."
        )
    output = head_layer.input if hidden_layer is None else _layer(model, hidden_layer).output
    body = _model_class(model)(model.inputs, output)

    def hidden_states(features, training):
        inputs = [features[name] for name in input_names]
        return body(inputs[0] if len(inputs) == 1 else inputs, training=training)

    def head():
        if is_tied:
            kernel, bias = tf.transpose(tf.convert_to_tensor(head_layer.embeddings)), None
        else:
            kernel, bias = head_layer.kernel, head_layer.bias
        return Head(kernel, bias, logit_scale, logit_softcap)

    return LanguageModel(hidden_states, head, (body, head_layer))


def _layer(model, name):
    try:
        return model.get_layer(name)
    except ValueError as error:
        raise ValueError(
            f"The model has no layer {name!r}; it has "
            f"{', '.join(layer.name for layer in model.layers)}."
        ) from error


def _model_class(model):
    if isinstance(model, keras.Model):
        return keras.Model
    # Keras 3 is loaded if a model of it is here; only then does this package need it.
    return sys.modules["keras"].Model


def _distinct(variables):
    """The TensorFlow variables of tf_keras and Keras 3 variables, each once."""
    own = (v if isinstance(v, tf.Variable) else v.value for v in variables)
    return list({id(variable): variable for variable in own}.values())
