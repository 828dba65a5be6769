"""BertModel takes any length, any batch and every mode, and gives the padded input's numbers."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from bigbird.core.modeling import BertModel
from bigbird.core.recompute_grad import RecomputeContext


def _ids(batch, length, vocab_size=50, seed=0):
    return np.random.default_rng(seed).integers(1, vocab_size, [batch, length], np.int32)


def _same_weights(params, other_params):
    model, other = BertModel(params), BertModel(other_params)
    other.set_weights(model.get_weights())
    return model, other


@pytest.mark.parametrize("attention_type", ["block_sparse", "simulated_sparse", "original_full"])
@pytest.mark.parametrize("length", [1, 17, 300, 639, 640])
def test_a_short_input_gives_what_the_padded_input_gives(tiny_params, attention_type, length):
    model = BertModel({**tiny_params, "attention_type": attention_type})
    ids = _ids(2, length)
    padded = np.pad(ids, [[0, 0], [0, 640 - length]])
    short_sequence, short_pooled = model(ids)
    sequence, pooled = model(padded)
    np.testing.assert_allclose(short_sequence, sequence[:, :length], atol=2e-5)
    np.testing.assert_allclose(short_pooled, pooled, atol=2e-5)


@pytest.mark.parametrize("length", [128, 560, 640, 1024, 4096])
@pytest.mark.parametrize("padding", [0, 37])
def test_block_sparse_equals_the_simulated_mask(tiny_params, length, padding):
    params = {
        **tiny_params,
        "max_encoder_length": length,
        "max_position_embeddings": 4096,
        "num_hidden_layers": 1,
        "block_size": 64 if length == 4096 else 16,
    }
    block, simulated = _same_weights(params, {**params, "attention_type": "simulated_sparse"})
    ids = _ids(1, length)
    ids[:, length - padding :] = 0
    real = ids > 0
    np.testing.assert_allclose(
        block(ids)[0].numpy()[real], simulated(ids)[0].numpy()[real], atol=2e-5
    )


@pytest.mark.parametrize("length", [48, 176, 192, 208])
def test_input_patterns_follow_the_length_of_the_input(tiny_params, length):
    params = {**tiny_params, "pattern_length": "input"}
    model, simulated = _same_weights(params, {**params, "attention_type": "simulated_sparse"})
    _, full = _same_weights(params, {**params, "attention_type": "original_full"})
    full.set_weights(model.get_weights())
    simulated.set_weights(model.get_weights())
    ids = _ids(1, length)
    sequence = model(ids)[0].numpy()
    np.testing.assert_allclose(sequence, simulated(ids)[0], atol=2e-5)
    is_full = np.allclose(sequence, full(ids)[0], atol=2e-5)
    assert is_full == (length <= 11 * 16)


def test_an_input_pattern_of_unknown_length_is_refused(tiny_params):
    model = BertModel({**tiny_params, "pattern_length": "input"})
    with pytest.raises(ValueError, match="unknown length"):
        tf.function(model).get_concrete_function(tf.TensorSpec([None, None], tf.int32))


def test_batch_and_length_may_be_unknown_in_a_graph(tiny_params):
    model = BertModel(tiny_params)
    graph = tf.function(model, input_signature=[tf.TensorSpec([None, None], tf.int32)])
    for batch, length in [(1, 640), (3, 100), (2, 7)]:
        ids = _ids(batch, length)
        np.testing.assert_allclose(graph(tf.constant(ids))[0], model(ids)[0], atol=1e-5)


def test_padding_ids_never_change_a_real_token(tiny_params):
    model = BertModel(tiny_params)
    ids = _ids(1, 300)
    ids[:, 250:] = 0
    token_types = np.zeros_like(ids)
    other_types = token_types.copy()
    other_types[:, 250:] = 1
    np.testing.assert_array_equal(
        model(ids, token_types)[0][:, :250], model(ids, other_types)[0][:, :250]
    )


@pytest.mark.parametrize("attention_type", ["block_sparse", "simulated_sparse", "original_full"])
def test_a_wholly_padded_document_gives_finite_numbers_and_gradients(tiny_params, attention_type):
    model = BertModel({**tiny_params, "attention_type": attention_type})
    ids = np.concatenate([np.zeros([1, 640], np.int32), _ids(1, 640)])
    with tf.GradientTape() as tape:
        sequence, pooled = model(ids)
        loss = tf.reduce_sum(sequence) + tf.reduce_sum(pooled)
    for gradient in tape.gradient(loss, model.trainable_variables):
        assert np.isfinite(tf.convert_to_tensor(gradient)).all()


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_stays_near_float32(tiny_params, policy):
    expected = BertModel(tiny_params)
    keras.mixed_precision.set_global_policy(policy)
    try:
        model = BertModel(tiny_params)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    model.set_weights(expected.get_weights())
    ids = _ids(1, 640)
    sequence = model(ids)[0]
    assert sequence.dtype == keras.mixed_precision.Policy(policy).compute_dtype
    # bfloat16 keeps 8 bits: values of size about 1 carry errors of 1/256 through two layers.
    np.testing.assert_allclose(tf.cast(sequence, tf.float32), expected(ids)[0], atol=0.1)


@pytest.mark.parametrize(
    ("policy", "jit_compile"),
    [("full", False), ("every_n", False), ("attention", False), ("full", True)],
)
def test_recomputation_changes_neither_loss_nor_gradients(tiny_params, policy, jit_compile):
    params = {**tiny_params, "hidden_dropout_prob": 0.1, "num_hidden_layers": 1}
    model, recomputed = _same_weights(params, {**params, "gradient_checkpointing_policy": policy})
    ids = tf.constant(_ids(1, 640))

    def forward_backward(network):
        @tf.function(jit_compile=jit_compile)
        def run():
            with RecomputeContext(seed=tf.constant([1, 2])), tf.GradientTape() as tape:
                sequence, pooled = network(ids, training=True)
                loss = tf.reduce_mean(sequence**2) + tf.reduce_mean(pooled)
            return loss, tape.gradient(loss, network.trainable_variables)

        return run()

    loss, gradients = forward_backward(model)
    recomputed_loss, recomputed_gradients = forward_backward(recomputed)
    np.testing.assert_allclose(recomputed_loss, loss, rtol=1e-6)
    for actual, expected in zip(recomputed_gradients, gradients, strict=True):
        actual, expected = tf.convert_to_tensor(actual), tf.convert_to_tensor(expected)
        # Compiled, the two programs may sum in different orders; in a graph they do not.
        tolerance = 2e-6 * np.abs(expected).max() if jit_compile else 0
        np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def test_twelve_simulated_layers_at_4096_keep_the_graph_small(tiny_params):
    model = BertModel(
        {
            **tiny_params,
            "attention_type": "simulated_sparse",
            "max_encoder_length": 4096,
            "max_position_embeddings": 4096,
            "num_hidden_layers": 12,
            "num_attention_heads": 2,
        }
    )
    graph = tf.function(model).get_concrete_function(tf.TensorSpec([1, 4096], tf.int32)).graph
    assert graph.as_graph_def().ByteSize() < 50e6


def test_params_are_left_unchanged_and_the_model_can_be_made_again_from_its_config(tiny_params):
    before = dict(tiny_params)
    model = BertModel(tiny_params)
    assert tiny_params == before
    again = BertModel.from_config(model.get_config())
    again.set_weights(model.get_weights())
    ids = _ids(1, 100)
    np.testing.assert_array_equal(again(ids)[1], model(ids)[1])


def test_the_pattern_survives_a_second_model_and_global_seeds(tiny_params):
    model, other = _same_weights(tiny_params, tiny_params)
    ids = _ids(1, 640)
    np.testing.assert_array_equal(model(ids)[0], other(ids)[0])
    np.testing.assert_array_equal(model(ids)[0], model(ids, training=True)[0])


def test_input_beyond_the_model_is_refused(tiny_params):
    with pytest.raises(ValueError, match="max_encoder_length=640"):
        BertModel(tiny_params)(np.ones([1, 641], np.int32))
