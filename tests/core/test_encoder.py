"""Encoder layers keep Keras habits: config, every dtype, masks of all forms, recomputation."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from bigbird.core import attention, encoder
from bigbird.core.attention import MultiHeadedAttentionLayer
from bigbird.core.attention_core import attend
from bigbird.core.recompute_grad import RecomputeContext

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "seq_length": 640,
    "block_size": 64,
    "num_rand_blocks": 1,
    "hidden_dropout_prob": 0.0,
}


def _hidden(length=640, batch=1):
    values = np.random.default_rng(0).standard_normal([batch, length, 16])
    return tf.constant(values, tf.float32)


@pytest.mark.parametrize(
    "layer_class",
    [encoder.EncoderLayer, encoder.PrenormEncoderLayer, encoder.PostnormEncoderLayer],
)
def test_a_layer_is_made_again_from_its_config(layer_class):
    layer = layer_class("block_sparse", **SIZES, seed=3, name="layer_0")
    hidden = _hidden()
    expected = layer(hidden)
    again = layer_class.from_config(layer.get_config())
    again.build(hidden.shape)
    again.set_weights(layer.get_weights())
    np.testing.assert_array_equal(again(hidden), expected)


def test_the_2021_mask_arguments_equal_the_token_mask():
    layer = encoder.PostnormEncoderLayer("block_sparse", **SIZES, name="layer_0")
    hidden = _hidden()
    tokens = np.arange(640)[None] < 600
    mask = tf.constant(tokens, tf.float32)
    expected = layer(hidden, tf.constant(tokens))
    actual = layer(
        hidden, None, None, mask[:, None, :, None], mask[:, None, None, :], None, training=False
    )
    np.testing.assert_array_equal(actual[:, :600], expected[:, :600])


@pytest.mark.parametrize("dtype", [tf.int32, tf.bool, tf.float32, tf.bfloat16])
@pytest.mark.parametrize("attention_type", ["original_full", "block_sparse"])
def test_masks_of_any_dtype_work_compiled(attention_type, dtype):
    layer = encoder.EncoderLayer(attention_type, **SIZES, name="layer_0")
    hidden = _hidden()
    tokens = tf.constant(np.arange(640)[None] < 600)
    compiled = tf.function(layer, jit_compile=True)
    np.testing.assert_allclose(
        compiled(hidden, tf.cast(tokens, dtype))[:, :600],
        layer(hidden, tokens)[:, :600],
        atol=1e-5,
    )


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float16"])
def test_a_policy_of_a_layer_is_that_of_its_parts(policy):
    layer = encoder.EncoderLayer("block_sparse", **SIZES, dtype=policy)
    output = layer(_hidden())
    assert output.dtype == layer.compute_dtype
    parts = [part for part in layer._flatten_layers() if part is not layer]
    assert {part.dtype_policy.name for part in parts} == {policy}
    again = encoder.EncoderLayer.from_config(layer.get_config())
    assert again(_hidden()).dtype == layer.compute_dtype


def test_a_layer_trains_inside_a_functional_model():
    inputs = keras.Input([640, 16])
    layer = encoder.add_gradient_recomputation(encoder.EncoderLayer)("block_sparse", **SIZES)
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)[:, 0]))
    model.compile("sgd", "mse")
    before = model.get_weights()
    model.fit(_hidden(batch=2), np.ones([2, 1]), epochs=1, verbose=0)
    changed = [not np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True)]
    # The key bias moves no softmax, so it alone may keep its value.
    assert sum(changed) >= len(changed) - 1


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="norm_type='sandwich'"):
        encoder.EncoderLayer("block_sparse", norm_type="sandwich")
    with pytest.raises(ValueError, match="attention_type='ring'"):
        MultiHeadedAttentionLayer("ring")


def test_sparse_attention_between_unlike_lengths_is_refused():
    with pytest.raises(ValueError, match="self-attention"):
        MultiHeadedAttentionLayer("block_sparse", from_seq_length=64, to_seq_length=128)


def test_attention_returns_heads_apart():
    layer = MultiHeadedAttentionLayer("original_full", 2, 8, name="attention/self")
    assert layer(_hidden(32), _hidden(48)).shape == [1, 32, 2, 8]


@pytest.mark.parametrize("shape", [None, [2, 24], [1, 24], [2, 1, 1, 24], [2, 1, 20, 24]])
def test_long_full_attention_is_streamed_unless_masked_by_pairs(monkeypatch, shape):
    layer = MultiHeadedAttentionLayer("original_full", 2, 8, attention_probs_dropout_prob=0.5)
    queries, keys = _hidden(20, batch=2), _hidden(24, batch=2)
    mask = None if shape is None else np.random.default_rng(1).random(shape) < 0.5
    expected = layer(queries, keys, mask)

    streamed = []
    monkeypatch.setattr(attention, "STREAMED_PAIRS", 20 * 24)
    monkeypatch.setattr(attention, "attend", lambda *a, **k: streamed.append(a) or attend(*a, **k))
    np.testing.assert_allclose(layer(queries, keys, mask), expected, atol=1e-6)
    assert len(streamed) == (shape != [2, 1, 20, 24])
    dropped = layer(queries, keys, mask, training=True)
    assert not np.allclose(dropped, expected, atol=1e-3)


@pytest.mark.parametrize("attention_type", ["block_sparse", "simulated_sparse"])
@pytest.mark.parametrize("applies", [True, False])
def test_sparse_types_drop_attention_only_where_asked(attention_type, applies):
    layer = MultiHeadedAttentionLayer(
        attention_type,
        num_attention_heads=2,
        size_per_head=4,
        num_rand_blocks=1,
        from_seq_length=640,
        to_seq_length=640,
        attention_probs_dropout_prob=0.5,
        sparse_attention_dropout=applies,
    )
    hidden = tf.random.stateless_normal([1, 640, 8], seed=[0, 1])

    def attended(seed, training=True):
        with RecomputeContext(seed=seed):
            return layer(hidden, hidden, training=training).numpy()

    plain = attended(1, training=False)
    np.testing.assert_array_equal(attended(1), attended(1))
    assert np.array_equal(attended(1), plain) != applies
    assert np.array_equal(attended(1), attended(2)) != applies
