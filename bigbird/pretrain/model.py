"""What is pretrained and what is exported: a `BertModel` with its heads, and strings to vectors.

Axis letters: B batch, L length, P predictions of a sequence, D model, V vocabulary.
"""

from __future__ import annotations

import tensorflow as tf
import tf_keras as keras

from bigbird.core import training
from bigbird.core.config import BigBirdConfig
from bigbird.core.layers import create_initializer, get_activation
from bigbird.core.modeling import BertModel
from bigbird.pretrain.heads import WEIGHT_EPSILON, MaskedLMLayer, NSPLayer


class BertPretrainer(training.SeededModel):
    """A `BertModel` that learns hidden words and, with `use_nsp`, which segments follow each other.

    Batches are `(features, features)`, the features of `masking.WordMasker`. The loss is the sum of
    the heads' losses; the numbers shown are means over predictions and over sequences.
    """

    def __init__(self, params, use_nsp: bool = False, **kwargs):
        """Creates the model from a `BigBirdConfig` or a dict of the same keys."""
        super().__init__(**kwargs)
        config = BigBirdConfig.from_params(params)
        self.use_nsp = use_nsp
        self.bert = BertModel(config)
        # Hidden words do not reach it.
        self.bert.pooler.trainable = use_nsp
        self.masked_lm = MaskedLMLayer(
            config.hidden_size,
            config.vocab_size,
            self.bert.embeddings,
            create_initializer(config.initializer_range),
            get_activation(config.hidden_act),
            layer_norm_epsilon=config.layer_norm_epsilon,
        )
        self.next_sentence = None
        names = ["loss", "masked_lm_loss", "masked_lm_accuracy"]
        if use_nsp:
            initializer = create_initializer(config.initializer_range)
            self.next_sentence = NSPLayer(config.hidden_size, initializer)
            names += ["next_sentence_loss", "next_sentence_accuracy"]
        self.means = {name: keras.metrics.Mean(name=name) for name in names}
        self.built = True

    @property
    def heads(self) -> dict[str, keras.layers.Layer]:
        """The heads by their names in `checkpoint.load_initial_weights`."""
        heads = {"masked_lm": self.masked_lm, "next_sentence": self.next_sentence}
        return {name: head for name, head in heads.items() if head is not None}

    @property
    def metrics(self):
        return list(self.means.values())

    def call(self, features, training=None):
        """Features -> float32 log-probabilities of words `[B, P, V]`, next sentence `[B, 2]`."""
        sequence_output, pooled_output = self.bert(
            features["input_ids"], features["segment_ids"], training=training
        )
        positions = features["masked_lm_positions"]
        _, words = self.masked_lm(sequence_output, masked_lm_positions=positions)
        if not self.use_nsp:
            return words, None
        return words, self.next_sentence(pooled_output)[1]

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        """The sum of the heads' losses, from their log-probabilities `y_pred`."""
        words, next_sentence = y_pred
        loss = self._scored("masked_lm", words, y["masked_lm_ids"], y["masked_lm_weights"])
        if self.use_nsp:
            labels = y["next_sentence_labels"][:, 0]
            ones = tf.ones(tf.shape(labels))
            loss += self._scored("next_sentence", next_sentence, labels, ones)
        predictions = tf.reduce_sum(y["masked_lm_weights"])
        self.means["loss"].update_state(loss, predictions)
        # The gradients of the replicas are added up; Keras divides losses of its own so too.
        return loss / tf.distribute.get_strategy().num_replicas_in_sync

    def compute_metrics(self, x, y, y_pred, sample_weight):
        """Returns what `compute_loss` counted."""
        return self.get_metrics_result()

    def _scored(self, head, log_probs, labels, weights):
        """Returns the weighted mean loss of a head, and counts it."""
        losses = -tf.gather(log_probs, labels, axis=-1, batch_dims=labels.shape.rank)
        right = tf.equal(tf.argmax(log_probs, axis=-1, output_type=tf.int32), labels)
        self.means[f"{head}_loss"].update_state(losses, weights)
        self.means[f"{head}_accuracy"].update_state(right, weights)
        return tf.reduce_sum(losses * weights) / (tf.reduce_sum(weights) + WEIGHT_EPSILON)

    def loss_weight(self, data):
        """Returns the number of predictions, so that accumulation equals the large batch."""
        features, _ = data
        return tf.reduce_sum(features["masked_lm_weights"]) + WEIGHT_EPSILON

    def get_config(self):
        return {"params": self.bert.config.to_dict(), "use_nsp": self.use_nsp}


class ServedEncoder(tf.Module):
    """What an export holds: strings in, vectors of their pieces and of the whole out."""

    def __init__(self, model: BertPretrainer, encode):
        """Serves the encoder of `model`; `encode` turns strings `[B]` into ids `[B, L]`."""
        super().__init__()
        # The heads too: an export is a checkpoint that training can go on from.
        heads = model.heads.values()
        self.exported_variables = [*model.bert.variables, *(v for h in heads for v in h.variables)]
        # In a closure, since a model as attribute would be exported whole, its training too.
        self._encoded = lambda ids: model.bert(ids, training=False)
        self.encode = encode

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="text")])
    def serve(self, text):
        """Returns `input_ids [B, L]`, `sequence_output [B, L, D]` and `pooled_output [B, D]`."""
        ids = self.encode(text)
        with training.inference_context():
            sequence_output, pooled_output = self._encoded(ids)
        return {
            "input_ids": ids,
            "sequence_output": sequence_output,
            "pooled_output": pooled_output,
        }
