"""Decoder layers and stacks: one position at a time equals all at once; config, dtypes, sharing."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from bigbird.core import decoder
from bigbird.core.config import BigBirdConfig
from bigbird.core.encoder import EncoderStack

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
}
BATCH, LENGTH, TARGETS = 2, 7, 5


def _random(*shape, seed=0):
    return tf.constant(np.random.default_rng(seed).standard_normal(shape), tf.float32)


def _stack(params, **changes):
    config = BigBirdConfig.from_params({**params, "initializer_range": 0.5, **changes})
    encoder = EncoderStack(config) if config.couple_encoder_decoder else None
    stack = decoder.DecoderStack(config, encoder)
    stack.build([None, None, config.hidden_size])
    return stack


@pytest.mark.parametrize(
    "layer_class",
    [decoder.DecoderLayer, decoder.PrenormDecoderLayer, decoder.PostnormDecoderLayer],
)
def test_a_layer_is_made_again_from_its_config(layer_class):
    layer = layer_class(**SIZES, name="layer_0")
    hidden, document = _random(BATCH, TARGETS, 16), _random(BATCH, LENGTH, 16, seed=1)
    expected = layer(hidden, document)
    again = layer_class.from_config(layer.get_config())
    again.build(hidden.shape)
    again.set_weights(layer.get_weights())
    np.testing.assert_array_equal(again(hidden, document), expected)


def test_an_unknown_norm_type_is_refused():
    with pytest.raises(ValueError, match="norm_type='sandwich'"):
        decoder.DecoderLayer(norm_type="sandwich")


def test_masks_of_2021_equal_the_boolean_ones():
    layer = decoder.PrenormDecoderLayer(**SIZES, name="layer_0")
    hidden, document = _random(BATCH, TARGETS, 16), _random(BATCH, LENGTH, 16, seed=1)
    causal = decoder.causal_mask(TARGETS)
    tokens = tf.constant([[True] * 4 + [False] * 3, [True] * 7])
    expected = layer(hidden, document, causal, tokens)
    floats = tf.cast(tokens, tf.float32)[:, tf.newaxis, tf.newaxis, :]
    actual = layer(hidden, document, tf.cast(causal, tf.float32), floats, training=False)
    np.testing.assert_array_equal(actual, expected)
    # What is masked has no influence.
    other = tf.where(tokens[..., tf.newaxis], document, 9.0)
    np.testing.assert_allclose(layer(hidden, other, causal, tokens), expected, atol=1e-6)


def test_a_position_sees_those_before_it_only(tiny_params):
    stack = _stack(tiny_params)
    hidden, document = _random(1, TARGETS, 16), _random(1, LENGTH, 16, seed=1)
    mask = tf.ones([1, LENGTH], tf.bool)
    expected = stack(hidden, None, document, mask)
    changed = tf.concat([hidden[:, :3], -hidden[:, 3:]], axis=1)
    actual = stack(changed, None, document, mask)
    np.testing.assert_array_equal(actual[:, :3], expected[:, :3])
    assert np.abs(actual[:, 3:] - expected[:, 3:]).max(axis=-1).min() > 0.01


@pytest.mark.parametrize("norm_type", ["prenorm", "postnorm"])
def test_steps_with_a_cache_equal_all_positions_at_once(tiny_params, norm_type):
    """Two beams of every document whose slots in the cache cross after the second position."""
    stack = _stack(tiny_params, norm_type=norm_type, num_decoder_layers=3)
    document, mask = _random(BATCH, LENGTH, 16, seed=1), tf.constant([[True] * 4 + [False] * 3] * 2)
    texts = _random(BATCH, 2, TARGETS, 16, seed=2).numpy()
    texts[:, 1, :2] = texts[:, 0, :2][:, ::-1]
    # From position 2 on, beam 0 continues what was written in slot 1, and beam 1 what was in 0.
    written = texts.copy()
    written[:, :, :2] = texts[:, ::-1, :2]
    slots = np.array([[1, 1, 0, 0, 0], [0, 0, 1, 1, 1]])

    cache = tf.nest.map_structure(
        lambda x: tf.pad(x, [[0, 0], [0, 0], [0, TARGETS], [0, 0], [0, 0]]),
        stack.empty_cache(BATCH, beams=2),
    )
    keys_values = stack.read_document(document)
    for position in range(TARGETS):
        own = np.arange(2)[:, None] if position < 2 else slots
        past = np.arange(TARGETS) <= position
        visible = (own[..., None] == np.arange(2)) & past[:, None]
        visible = np.broadcast_to(visible, [2, TARGETS, 2])
        rows = tf.constant(written[:, :, position].reshape(-1, 16))
        hidden, cache = stack.step(
            rows, 2, tf.constant(position), cache, visible[None], keys_values, mask
        )
        expected = written if position < 2 else texts
        expected = tf.constant(expected[:, :, : position + 1].reshape(BATCH * 2, -1, 16))
        at_once = stack(expected, None, tf.repeat(document, 2, axis=0), tf.repeat(mask, 2, axis=0))
        np.testing.assert_allclose(hidden, at_once[:, -1], atol=2e-5)


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.float16])
def test_a_position_is_written_and_the_others_are_kept(dtype, jit_compile):
    cache = tf.cast(tf.reshape(tf.range(2 * 2 * 4 * 3 * 2), [2, 2, 4, 3, 2]), dtype)
    new = -tf.ones([2, 2, 3, 2], dtype)
    write = tf.function(decoder.write_position, jit_compile=jit_compile)
    expected = cache.numpy()
    expected[:, :, 2] = -1
    np.testing.assert_array_equal(write(tf.constant(2), cache, new), expected)


def test_a_document_of_padding_gives_finite_numbers_and_gradients(tiny_params):
    stack = _stack(tiny_params)
    hidden, document = _random(1, TARGETS, 16), _random(1, LENGTH, 16, seed=1)
    with tf.GradientTape() as tape:
        outputs = stack(hidden, None, document, tf.zeros([1, LENGTH], tf.bool), training=True)
        loss = tf.reduce_sum(outputs**2)
    assert np.isfinite(outputs).all()
    for gradient in tape.gradient(loss, stack.trainable_variables):
        assert np.isfinite(gradient).all()


def test_a_layer_trains_inside_a_functional_model():
    inputs, document = keras.Input([TARGETS, 16]), keras.Input([LENGTH, 16])
    layer = decoder.DecoderLayer(**SIZES)
    model = keras.Model([inputs, document], keras.layers.Dense(1)(layer(inputs, document)[:, 0]))
    model.compile("sgd", "mse")
    before = model.get_weights()
    data = [_random(BATCH, TARGETS, 16), _random(BATCH, LENGTH, 16, seed=1)]
    model.fit(data, np.ones([BATCH, 1]), epochs=1, verbose=0)
    changed = [not np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True)]
    # The two key biases move no softmax, so they alone may keep their values.
    assert sum(changed) >= len(changed) - 2


def test_a_coupled_stack_has_only_cross_attention_of_its_own(tiny_params):
    config = BigBirdConfig.from_params({**tiny_params, "couple_encoder_decoder": True})
    encoder = EncoderStack(config)
    encoder.build([None, None, 16])
    stack = decoder.DecoderStack(config, encoder)
    stack.build([None, None, 16])
    shared = {id(v) for v in encoder.variables}
    own = [v.name for v in stack.variables if id(v) not in shared]
    assert {id(v) for v in stack.variables} >= shared
    assert own and all("/attention/encdec" in name for name in own)


def test_a_coupled_stack_without_an_encoder_is_refused(tiny_params):
    with pytest.raises(ValueError, match="pass the EncoderStack"):
        decoder.DecoderStack({**tiny_params, "couple_encoder_decoder": True})


@pytest.mark.parametrize(
    ("policy", "recomputed"),
    [("none", []), ("full", [0, 1, 2]), ("every_n", [0, 2]), ("attention", [])],
)
def test_policies_choose_what_is_recomputed(tiny_params, policy, recomputed):
    stack = _stack(tiny_params, num_decoder_layers=3, gradient_checkpointing_policy=policy)
    plain = [type(layer) is decoder.DecoderLayer for layer in stack.decoder_layers]
    assert [index for index in range(3) if not plain[index]] == recomputed
    assert all(
        layer.recompute_attention == (policy == "attention") for layer in stack.decoder_layers
    )
