"""What is trained and what is served: a `TransformerModel` with its loss, and strings to summaries.

Axis letters: B batch, L document length, T target length, D model, V vocabulary.
"""

from __future__ import annotations

import tensorflow as tf
import tf_keras as keras

from bigbird.core import training
from bigbird.core.config import BigBirdConfig
from bigbird.core.modeling import TransformerModel
from bigbird.summarization.loss import smoothed_cross_entropy


class Summarizer(training.SeededModel):
    """A `TransformerModel` that learns the next token of summaries from the ones before it.

    Batches are `((document ids [B, L], target ids [B, T]), target ids)`. The loss is that of
    `loss.padded_cross_entropy_loss`; every number is a mean over target tokens.
    """

    def __init__(self, params, **kwargs):
        """Creates the model from a `BigBirdConfig` or a dict of the same keys."""
        super().__init__(**kwargs)
        config = BigBirdConfig.from_params(params)
        self.config = config
        self.transformer = TransformerModel(config)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.cross_entropy = keras.metrics.Mean(name="cross_entropy")
        self.built = True

    def call(self, inputs, training=None):
        """Document and target ids -> hidden states `[B, T, D]` of the decoder."""
        document_ids, target_ids = inputs
        return self.transformer.decode_targets(document_ids, target_ids, training=training)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        """The mean loss over the target tokens, shared out over the replicas."""
        del x, sample_weight
        logits = self.transformer.project(y_pred)
        losses, cross_entropies = smoothed_cross_entropy(logits, y, self.config.label_smoothing)
        is_target = self._is_target(y)
        tokens = tf.reduce_sum(is_target)
        loss = tf.math.divide_no_nan(tf.reduce_sum(losses * is_target), tokens)
        self.loss_tracker.update_state(losses, is_target)
        self.cross_entropy.update_state(cross_entropies, is_target)
        # As Keras does for losses of its own: the gradients of the replicas are added up.
        return loss / tf.distribute.get_strategy().num_replicas_in_sync

    def loss_weight(self, data):
        """Returns the number of target tokens, so that accumulation equals the large batch."""
        _, target_ids = data
        return tf.reduce_sum(self._is_target(target_ids))

    def _is_target(self, target_ids):
        return tf.cast(tf.not_equal(target_ids, self.config.pad_token_id), tf.float32)

    def get_config(self):
        return {"params": self.config.to_dict()}
