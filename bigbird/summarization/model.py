"""What is trained and what is served: a `TransformerModel` with its loss, and strings to summaries.

Axis letters: B batch, L document length, T target length, D model, V vocabulary.
"""

from __future__ import annotations

import tensorflow as tf
import tf_keras as keras

from bigbird.core import training
from bigbird.core.beam_search import DecodingOptions
from bigbird.core.config import BigBirdConfig
from bigbird.core.memory import TrainingPlan, plan_step
from bigbird.core.modeling import TransformerModel
from bigbird.core.pairs import PairEncoder
from bigbird.core.recompute_grad import RecomputeContext
from bigbird.summarization.loss import check_smoothing, smoothed_cross_entropy


class Summarizer(training.SeededModel):
    """A `TransformerModel` that learns the next token of summaries from the ones before it.

    Batches are `((document ids [B, L], target ids [B, T]), target ids)`. The loss is that of
    `loss.padded_cross_entropy_loss`; every number is a mean over target tokens.
    """

    def __init__(self, params, label_smoothing: float = 0.0, **kwargs):
        """Creates the model from a `BigBirdConfig` or a dict of the same keys.

        Raises:
          ValueError: for a share of smoothing outside [0, 1).
        """
        super().__init__(**kwargs)
        check_smoothing(label_smoothing)
        self.config = BigBirdConfig.from_params(params)
        self.label_smoothing = label_smoothing
        self.transformer = TransformerModel(self.config)
        self.loss_mean = keras.metrics.Mean(name="loss")
        self.cross_entropy_mean = keras.metrics.Mean(name="cross_entropy")
        self.built = True

    def call(self, inputs, training=None):
        """Document and target ids -> hidden states `[B, T, D]` of the decoder."""
        document_ids, target_ids = inputs
        hidden, _ = self.transformer.hidden_states(document_ids, target_ids, training=training)
        return hidden

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        """The mean loss over target tokens `y`, from hidden states `y_pred`."""
        losses, cross_entropies = self.token_losses(y_pred, y)
        is_target = self._is_target(y)
        self.loss_mean.update_state(losses, is_target)
        self.cross_entropy_mean.update_state(cross_entropies, is_target)
        loss = tf.math.divide_no_nan(tf.reduce_sum(losses * is_target), tf.reduce_sum(is_target))
        # The gradients of the replicas are added up; Keras divides losses of its own so too.
        return loss / tf.distribute.get_strategy().num_replicas_in_sync

    def token_losses(self, hidden, target_ids):
        """Loss and cross entropy `[B, T]`: the one place that projects to the vocabulary."""
        logits = self.transformer.vocabulary_logits(hidden)
        return smoothed_cross_entropy(logits, target_ids, self.label_smoothing)

    def loss_weight(self, data):
        """Returns the number of target tokens, so that accumulation equals the large batch."""
        _, target_ids = data
        return tf.reduce_sum(self._is_target(target_ids))

    def _is_target(self, target_ids):
        return tf.cast(tf.not_equal(target_ids, self.config.pad_token_id), tf.float32)

    def get_config(self):
        return {"params": self.config.to_dict(), "label_smoothing": self.label_smoothing}


def plan_training(params, batch_size: int, optimizer: str) -> TrainingPlan:
    """Plans the memory of a training step at the config's lengths; see `memory.plan_training`."""
    model = Summarizer(params)
    config = model.config
    lengths = (config.max_encoder_length, config.max_decoder_length)

    def step(document_ids, target_ids, seed):
        with tf.GradientTape() as tape, RecomputeContext(seed):
            hidden = model((document_ids, target_ids), training=True)
            loss = tf.reduce_sum(model.token_losses(hidden, target_ids)[0])
        return loss, tape.gradient(loss, model.trainable_variables)

    batch = [tf.TensorSpec([batch_size, length], tf.int32) for length in lengths]
    return plan_step(model, step, batch, optimizer)


class ServedSummarizer(tf.Module):
    """What an export holds: documents in, summaries out, both strings."""

    def __init__(
        self, transformer: TransformerModel, encoder: PairEncoder, options: DecodingOptions
    ):
        """Serves `transformer`, which searches as `options` say."""
        super().__init__()
        self.encoder = encoder
        self.exported_variables = transformer.variables
        # In a closure, since a model as attribute would be exported whole, its training too.
        self._generate = lambda document_ids: transformer.generate(document_ids, options)
        # A pattern that follows the input's length needs that length when the graph is made.
        self._pad_to_longest = transformer.config.pattern_length == "model"

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="document")])
    def serve(self, document):
        """Returns the `summary [B]` of each document and its length-normalised `score [B]`."""
        found = self._generate(self.encoder.documents(document, self._pad_to_longest))
        return {"summary": self.encoder.texts(found.ids), "score": found.scores}
