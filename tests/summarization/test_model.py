"""Claims about the trained model: every number is a mean over target tokens."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from bigbird.core.memory import fitting_policy
from bigbird.core.training import TrainingSettings
from bigbird.summarization.loss import padded_cross_entropy_loss
from bigbird.summarization.model import Summarizer, plan_training

SMOOTHING = 0.1


@pytest.fixture
def params(tiny_params):
    return {**tiny_params, "num_hidden_layers": 1, "max_encoder_length": 32, "block_size": 8}


@pytest.fixture
def batch():
    """Four pairs whose summaries differ much in length."""
    generator = np.random.default_rng(0)
    documents = generator.integers(3, 50, [4, 16])
    targets = generator.integers(3, 50, [4, 6])
    for row, length in zip(targets, (6, 1, 4, 2), strict=True):
        row[length:] = 0
    return tf.constant(documents, tf.int32), tf.constant(targets, tf.int32)


def compiled(params, **settings):
    keras.utils.set_random_seed(0)
    model = Summarizer(params, SMOOTHING)
    settings = TrainingSettings("unused", 1, 4, **settings)
    # Eager steps are faster than tracing one that is taken once.
    model.compile(keras.optimizers.SGD(0.1), run_eagerly=True, **settings.compile_arguments())
    return model


def dataset(documents, targets, batch_size):
    pairs = tf.data.Dataset.from_tensor_slices(((documents, targets), targets))
    return pairs.batch(batch_size)


def test_evaluation_is_the_mean_over_all_tokens_however_they_are_batched(params, batch):
    model = compiled(params)
    documents, targets = batch
    (_, logits, _), _ = model.transformer(documents, targets, training=True)
    expected = padded_cross_entropy_loss(logits, targets, SMOOTHING, 50)
    for batch_size in (3, 4):
        scores = model.evaluate(dataset(*batch, batch_size), return_dict=True, verbose=0)
        # Sums of another order.
        np.testing.assert_allclose(scores["loss"], expected, rtol=1e-5)
    plain = padded_cross_entropy_loss(logits, targets, 0.0, 50)
    np.testing.assert_allclose(scores["cross_entropy"], plain, rtol=1e-5)


def test_accumulated_parts_of_unequal_length_equal_the_large_batch(params, batch):
    trained = []
    for parts in (1, 2):
        model = compiled(params, gradient_accumulation_steps=parts)
        model.fit(dataset(*batch, 4), verbose=0)
        trained.append(model.transformer.get_weights())
    for whole, accumulated in zip(*trained, strict=True):
        # Two sums of float32 gradients instead of one.
        np.testing.assert_allclose(accumulated, whole, atol=1e-6)


def test_targets_of_padding_alone_move_nothing(params, batch):
    model = compiled(params)
    before = model.transformer.get_weights()
    model.fit(dataset(batch[0], tf.zeros_like(batch[1]), 4), verbose=0)
    for old, new in zip(before, model.transformer.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_the_auto_policy_counts_the_logits(params):
    config = {**params, "gradient_checkpointing_policy": "auto", "vocab_size": 4000}
    logits_bytes = 2 * 6 * 4000 * 4
    plan = plan_training({**config, "gradient_checkpointing_policy": "none"}, 2, "Adam")
    assert plan.step.total_bytes > logits_bytes
    assert plan.parameters > 4000 * 16
    with pytest.raises(ValueError, match="Nothing fits memory_budget_gb"):
        fitting_policy({**config, "memory_budget_gb": 1e-5}, 2, "Adam", lambda *_: plan)


def test_a_share_of_smoothing_that_is_none_is_told(params):
    with pytest.raises(ValueError, match="label_smoothing=-0.1"):
        Summarizer(params, -0.1)
