"""The heads of pretraining compute what they say, with the 2021 signatures."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from bigbird.core.layers import gelu
from bigbird.core.modeling import BertModel
from bigbird.pretrain.run_pretraining import MaskedLMLayer, NSPLayer


@pytest.fixture
def model(tiny_params):
    return BertModel(tiny_params)


@pytest.fixture
def head(model):
    head = MaskedLMLayer(16, 50, model.embeddings, activation_fn=gelu)
    rng = np.random.default_rng(0)
    for variable in (*head.transform.variables, *head.transform_norm.variables, head.output_bias):
        variable.assign(rng.standard_normal(variable.shape))
    return head


def _hidden(*shape):
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def _log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def _words(head, hidden):
    """Log-probabilities of words, in float64."""
    kernel, bias = (v.numpy().astype(np.float64) for v in head.transform.variables)
    x = hidden.astype(np.float64) @ kernel + bias
    x = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    x = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
    x = x * head.transform_norm.gamma.numpy() + head.transform_norm.beta.numpy()
    table = head.embeder.word_embeddings.numpy().astype(np.float64)
    return _log_softmax(x @ table.T + head.output_bias.numpy())


def test_words_are_predicted_at_the_given_places_only(head):
    hidden, positions = _hidden(2, 7, 16), np.array([[1, 6, 0], [3, 3, 0]])
    labels, weights = np.array([[4, 9, 0], [49, 1, 0]]), np.array([[1, 1, 0], [1, 0, 0]])
    loss, log_probs = head(hidden, labels, weights.astype(np.float32), positions)
    expected = _words(head, np.take_along_axis(hidden, positions[..., None], axis=1))
    np.testing.assert_allclose(log_probs, expected, rtol=1e-5)
    picked = np.take_along_axis(expected, labels[..., None], axis=2)[..., 0]
    np.testing.assert_allclose(loss, -(picked * weights).sum() / (3 + 1e-5), rtol=1e-5)


def test_without_positions_every_place_is_predicted(head):
    loss, log_probs = head(_hidden(2, 5, 16))
    assert log_probs.shape == [2, 5, 50] and loss == 0


def test_nothing_to_predict_gives_the_loss_zero(head):
    zeros = np.zeros([2, 3], np.int32)
    loss, _ = head(_hidden(2, 5, 16), zeros, zeros.astype(np.float32), zeros)
    assert loss == 0


def test_the_output_weights_are_the_word_table(model, head):
    with tf.GradientTape() as tape:
        loss, _ = head(_hidden(1, 3, 16), np.array([[1, 2, 3]]), np.ones([1, 3], np.float32))
    gradient = tape.gradient(loss, model.embeddings.word_embeddings)
    assert np.abs(gradient).max() > 0


def test_next_sentences_are_a_softmax_with_the_mean_cross_entropy():
    head = NSPLayer(16)
    hidden, labels = _hidden(3, 16), np.array([[0], [1], [1]])
    loss, log_probs = head(hidden, labels)
    expected = _log_softmax(hidden.astype(np.float64) @ head.output_weights.numpy().T)
    np.testing.assert_allclose(log_probs, expected, rtol=1e-5)
    picked = np.take_along_axis(expected, labels, axis=1)
    np.testing.assert_allclose(loss, -picked.mean(), rtol=1e-5)
    assert head(hidden)[0] == 0


def test_variables_bear_their_2021_names(head):
    names = [v.name for v in (*head.variables, *NSPLayer(16).variables)]
    assert {n for n in names if n.startswith("cls/")} == {
        "cls/predictions/transform/dense/kernel:0",
        "cls/predictions/transform/dense/bias:0",
        "cls/predictions/transform/LayerNorm/gamma:0",
        "cls/predictions/transform/LayerNorm/beta:0",
        "cls/predictions/output_bias:0",
        "cls/seq_relationship/output_weights:0",
        "cls/seq_relationship/output_bias:0",
    }


def test_heads_come_back_from_their_configs(head):
    for layer, shape in ((head, [1, 3, 16]), (NSPLayer(16), [2, 16])):
        copy = type(layer).from_config(layer.get_config())
        copy.set_weights(layer.get_weights())
        np.testing.assert_array_equal(layer(_hidden(*shape))[1], copy(_hidden(*shape))[1])


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_losses_are_float32_in_mixed_precision(tiny_params, policy):
    keras.mixed_precision.set_global_policy(policy)
    try:
        head = MaskedLMLayer(16, 50, BertModel(tiny_params).embeddings)
        sentence = NSPLayer(16)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    loss, log_probs = head(_hidden(1, 3, 16), np.array([[1, 2, 3]]), np.ones([1, 3], np.float32))
    assert loss.dtype == log_probs.dtype == tf.float32
    assert head.logits(tf.zeros([1, 3, 16], policy[6:])).dtype == policy[6:]
    assert sentence(_hidden(2, 16))[1].dtype == tf.float32
