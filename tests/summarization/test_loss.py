"""Claims about the loss of summaries."""

import numpy as np
import pytest
import tensorflow as tf

from bigbird.summarization.loss import padded_cross_entropy_loss, smoothed_cross_entropy

V = 7


def oracle(logits, labels, smoothing, count_padding=False):
    """The loss by its definition in float64; as in 2021 where padding counts."""
    logits = np.asarray(logits, np.float64)
    vocabulary = np.arange(logits.shape[-1])
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    q = np.where(vocabulary == labels[..., None], 1 - smoothing, smoothing / (len(vocabulary) - 1))
    entropy = -np.sum(q * np.log(np.where(q > 0, q, 1)), axis=-1)
    loss = -np.sum(q * log_p, axis=-1) - entropy
    is_target = labels != 0
    return np.sum(loss if count_padding else loss[is_target]) / is_target.sum()


@pytest.fixture
def example():
    generator = np.random.default_rng(0)
    labels = np.array([[3, 6, 1, 0, 0], [5, 1, 0, 0, 0]])
    return generator.standard_normal([2, 5, V]).astype(np.float32), labels


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
def test_loss_is_its_definition(example, smoothing):
    logits, labels = example
    loss = padded_cross_entropy_loss(tf.constant(logits), tf.constant(labels), smoothing, V)
    # Single precision.
    np.testing.assert_allclose(loss, oracle(logits, labels, smoothing), rtol=1e-5)


def test_padding_counts_nowhere(example):
    logits, labels = example
    logits = tf.Variable(logits)
    with tf.GradientTape() as tape:
        loss = padded_cross_entropy_loss(logits, tf.constant(labels), 0.1, V)
    gradient = tape.gradient(loss, logits).numpy()
    assert (gradient[labels == 0] == 0).all()
    assert (gradient[labels != 0] != 0).all()


def test_the_documented_example_of_2021_and_now():
    # Two tokens, two of padding, uniform logits over four pieces: docs/differences.md has both.
    labels, logits = np.array([[2, 1, 0, 0]]), np.zeros([1, 4, 4], np.float32)
    now = padded_cross_entropy_loss(tf.constant(logits), tf.constant(labels), 0.0, 4)
    assert f"{now:.4f}" == "1.3863"
    # The four positions were added up and divided by the two tokens.
    assert f"{oracle(logits, labels, 0.0, count_padding=True):.4f}" == "2.7726"


def test_a_perfect_model_has_loss_zero():
    smoothing = 0.1
    q = np.full([1, 1, V], smoothing / (V - 1), np.float32)
    q[..., 4] = 1 - smoothing
    loss = padded_cross_entropy_loss(tf.constant(np.log(q)), tf.constant([[4]]), smoothing, V)
    np.testing.assert_allclose(loss, 0, atol=1e-6)


def test_padding_alone_has_loss_zero():
    loss = padded_cross_entropy_loss(tf.zeros([2, 3, V]), tf.zeros([2, 3], tf.int32), 0.1, V)
    assert loss == 0


def test_plain_cross_entropy_comes_beside_it(example):
    logits, labels = example
    _, plain = smoothed_cross_entropy(tf.constant(logits), tf.constant(labels), 0.1)
    without, same = smoothed_cross_entropy(tf.constant(logits), tf.constant(labels), 0.0)
    np.testing.assert_array_equal(plain, without)
    np.testing.assert_array_equal(without, same)


def test_half_precision_logits_are_summed_in_single(example):
    logits, labels = tf.cast(example[0], tf.float16), example[1]
    loss, _ = smoothed_cross_entropy(logits, tf.constant(labels), 0.1)
    assert loss.dtype == tf.float32
    expected = oracle(logits.numpy(), labels, 0.1)
    mean = padded_cross_entropy_loss(logits, tf.constant(labels), 0.1, V)
    np.testing.assert_allclose(mean, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("smoothing", "vocab_size", "told"),
    [(1.0, V, "label_smoothing=1.0"), (0.1, V + 1, "vocab_size=8")],
)
def test_values_outside_their_range_are_told(smoothing, vocab_size, told):
    with pytest.raises(ValueError, match=told):
        padded_cross_entropy_loss(
            tf.zeros([1, 2, V]), tf.ones([1, 2], tf.int32), smoothing, vocab_size
        )
