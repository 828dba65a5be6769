"""The streamed feed-forward equals two dense layers, and holds the hidden states of few tokens."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from bigbird.core import feed_forward as module
from bigbird.core.encoder import EncoderLayer, add_gradient_recomputation
from bigbird.core.feed_forward import feed_forward
from bigbird.core.memory import planned_memory
from bigbird.core.recompute_grad import RecomputeContext, recompute_grad

MODES = {
    "eager": lambda f: f,
    "graph": tf.function,
    "xla": lambda f: tf.function(f, jit_compile=True),
}
WIDTH, HIDDEN = 8, 32

every_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture
def streams(monkeypatch):
    """Streams every recomputed feed-forward, five tokens at a time; lists what is streamed."""
    found = []
    streamed = module._streamed
    monkeypatch.setattr(module, "AT_ONCE", 5 * HIDDEN)
    monkeypatch.setattr(module, "STREAMED", 1)
    monkeypatch.setattr(module, "_streamed", lambda *a: found.append(a[0]) or streamed(*a))
    return found


class FeedForward(keras.layers.Layer):
    """A feed-forward by itself, with biases that matter."""

    def __init__(self, activation="gelu", **kwargs):
        super().__init__(**kwargs)
        self.dense = [
            keras.layers.Dense(
                units, activation=act, bias_initializer="random_normal", dtype=self.dtype_policy
            )
            for units, act in ((HIDDEN, activation), (WIDTH, None))
        ]

    def build(self, input_shape):
        keras.utils.set_random_seed(3)
        self.dense[0].build([None, WIDTH])
        self.dense[1].build([None, HIDDEN])
        self.built = True

    def call(self, inputs):
        return feed_forward(inputs, *self.dense)


Recomputed = add_gradient_recomputation(FeedForward)


def output_and_gradients(layer, mode="eager", shape=(2, 8, WIDTH), signature=None):
    layer.build(shape)

    def step(inputs, upstream):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = layer(inputs)
        sources = [inputs, *layer.trainable_weights]
        return outputs, *tape.gradient(outputs, sources, output_gradients=upstream)

    rng = np.random.default_rng(0)
    tensors = [tf.cast(rng.normal(size=shape), layer.compute_dtype) for _ in range(2)]
    if signature is not None:
        return tf.function(step, input_signature=[tf.TensorSpec(signature)] * 2)(*tensors)
    return MODES[mode](step)(*tensors)


def assert_close(found, expected, **tolerances):
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        np.testing.assert_allclose(tf.cast(x, tf.float32), tf.cast(y, tf.float32), **tolerances)


@every_mode
@pytest.mark.parametrize("activation", ["gelu", "relu", "softmax", None])
def test_streaming_changes_neither_values_nor_gradients(streams, mode, activation):
    # Sixteen tokens do not make whole steps of five.
    expected = output_and_gradients(FeedForward(activation))
    assert not streams
    found = output_and_gradients(Recomputed(activation), mode)
    assert len(streams) == 2
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


@every_mode
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_equals_float32_up_to_its_rounding(streams, mode, policy):
    expected = output_and_gradients(FeedForward())
    found = output_and_gradients(Recomputed(dtype=policy), mode)
    assert streams[0].dtype.name == policy.removeprefix("mixed_")
    precision = 2**-7 if policy == "mixed_bfloat16" else 2**-10
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(tf.cast(x, tf.float32), y, atol=4 * precision * np.abs(y).max())


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float64"])
def test_sums_of_parts_are_wide_enough(streams, monkeypatch, policy):
    """Ones add up to their number; a sum in bfloat16 stops at 256, one in float16 at 2,048."""
    monkeypatch.setattr(module, "AT_ONCE", HIDDEN)
    layer = Recomputed(dtype=policy)
    layer.build([None, WIDTH])
    tokens = tf.ones([4096, WIDTH], layer.compute_dtype)

    @tf.function
    def gradient_of_bias():
        with tf.GradientTape() as tape:
            outputs = layer(tokens)
        return tape.gradient(outputs, layer.dense[1].bias)

    np.testing.assert_array_equal(gradient_of_bias(), np.full([WIDTH], 4096.0))
    assert len(streams) == 2


def test_a_loop_and_a_saved_model_stream_too(streams, tmp_path):
    layer, recomputed = FeedForward("tanh"), Recomputed("tanh")
    x = tf.constant(np.random.default_rng(2).normal(size=[2, 8, WIDTH]), tf.float32)

    def gradient(layer, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in tf.range(3):
                y = layer(y)
        return tape.gradient(y, x)

    expected = tf.function(gradient)(layer, x)
    layer.build(x.shape)
    recomputed.build(x.shape)
    np.testing.assert_allclose(tf.function(gradient)(recomputed, x), expected, rtol=1e-5, atol=1e-6)
    assert streams

    holder = tf.Module()
    holder.layer = recomputed
    holder.apply = tf.function(recomputed.__call__, input_signature=[tf.TensorSpec([2, 8, WIDTH])])
    tf.saved_model.save(holder, str(tmp_path / "saved"))
    loaded = tf.saved_model.load(str(tmp_path / "saved"))

    def once(f):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        return tape.gradient(y, x)

    np.testing.assert_allclose(once(loaded.apply), once(layer), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("signature", [[None, 8, WIDTH], [2, None, WIDTH], [None, None, WIDTH]])
def test_sizes_may_be_unknown_until_the_graph_runs(streams, signature):
    expected = output_and_gradients(FeedForward())
    found = output_and_gradients(Recomputed(), signature=signature)
    assert len(streams) == 2
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_small_feed_forwards_are_not_streamed(streams, monkeypatch):
    monkeypatch.setattr(module, "STREAMED", 16 * HIDDEN + 1)
    output_and_gradients(Recomputed())
    output_and_gradients(Recomputed(), signature=[None, 8, WIDTH])
    assert not streams


@every_mode
@pytest.mark.parametrize("norm_type", ["prenorm", "postnorm"])
def test_a_recomputed_encoder_layer_streams_and_drops_the_same(streams, mode, norm_type):
    rng = np.random.default_rng(1)
    x = tf.constant(rng.normal(size=[2, 16, WIDTH]), tf.float32)

    def gradients(layer_class):
        layer = layer_class(
            "original_full",
            WIDTH,
            HIDDEN,
            num_attention_heads=2,
            hidden_dropout_prob=0.5,
            norm_type=norm_type,
            initializer_range=0.3,
            name="layer",
        )
        keras.utils.set_random_seed(5)
        layer.build(x.shape)

        def step(x):
            with tf.GradientTape() as tape, RecomputeContext(seed=7):
                tape.watch(x)
                loss = tf.reduce_sum(layer(x, training=True) ** 3)
            return loss, *tape.gradient(loss, [x, *layer.trainable_weights])

        return MODES[mode](step)(x)

    expected = gradients(EncoderLayer)
    assert not streams
    found = gradients(add_gradient_recomputation(EncoderLayer))
    assert len(streams) == 2
    # The gradient of the keys' bias is zero: what is left is the rounding of larger numbers.
    largest = max(np.abs(dy).max() for dy in expected)
    for dx, dy in zip(found, expected, strict=True):
        np.testing.assert_allclose(dx, dy, atol=1e-6 * largest)


def test_the_plan_has_no_room_for_all_hidden_states(streams, monkeypatch):
    tokens, hidden, at_once = 4096, 512, 256
    monkeypatch.setattr(module, "AT_ONCE", at_once * hidden)
    layers = [keras.layers.Dense(hidden, "gelu"), keras.layers.Dense(WIDTH)]
    layers[0].build([None, WIDTH])
    layers[1].build([None, hidden])

    def planned(wrap):
        f = wrap(lambda x: feed_forward(x, *layers))

        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(f(x) ** 2)
            return tape.gradient(loss, [x, *(w for y in layers for w in y.trainable_weights)])

        return planned_memory(step, tf.TensorSpec([1, tokens, WIDTH])).temporary_bytes

    all_hidden_states = 4 * tokens * hidden
    assert planned(lambda f: f) > all_hidden_states
    assert planned(recompute_grad) < all_hidden_states / 3
    assert len(streams) == 2


@every_mode
def test_only_a_streamed_feed_forward_refuses_second_derivatives(streams, mode):
    layer, recomputed = FeedForward("tanh"), Recomputed("tanh")
    x = tf.ones([1, 4, WIDTH])

    def second(layer):
        def step(x):
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = layer(x)
                first = inner.gradient(y, x)
            return outer.gradient(first, x)

        # AutoGraph would wrap the error in one of its own.
        return MODES[mode](tf.autograph.experimental.do_not_convert(step))(x)

    assert np.any(second(layer))
    with pytest.raises(LookupError, match="no second derivative"):
        second(recomputed)
