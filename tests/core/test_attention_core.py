"""The attention core against float64 numpy, in every mode, and what it promises besides."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import attention_oracle as oracle

from bigbird.core import attention_core
from bigbird.core.attention_core import attend
from bigbird.core.block_layout import (
    ABSENT,
    BIGBIRD_2021,
    BlockLayout,
    PatternOptions,
    layout_from_random_blocks,
    model_layout,
)
from bigbird.core.block_tiles import tile_tables
from bigbird.core.memory import planned_memory
from bigbird.core.recompute_grad import RecomputeContext, get_recompute_context, recompute_grad

MODES = {"eager": None, "graph": {"jit_compile": False}, "xla": {"jit_compile": True}}
ROUNDOFF = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}
# Each of a handful of products, exponentials and sums may add a roundoff.
ROUNDINGS = 8
SEED = [3, 4]


def draw_layout(rng, num_heads=2, num_blocks=8, block_size=4, num_random=2, options=BIGBIRD_2021):
    """A pattern whose random blocks may be absent, repeated or in the window."""
    random = rng.integers(ABSENT, num_blocks, [num_heads, num_blocks - 2, num_random])
    return layout_from_random_blocks(random, block_size, options)


def draw_inputs(rng, batch, num_heads, queries, keys, width, dtype="float32"):
    """Query, key, value and upstream gradient."""
    shapes = [[batch, num_heads, length, width] for length in (queries, keys, keys, queries)]
    return [tf.constant(rng.normal(size=shape), dtype) for shape in shapes]


def output_and_gradients(query, key, value, upstream, mask=None, layout=None, **options):
    with tf.GradientTape() as tape:
        tape.watch([query, key, value])
        output = attend(query, key, value, mask, layout, **options)
    return output, *tape.gradient(output, [query, key, value], output_gradients=upstream)


def oracle_weights(mask, layout=None, queries=None):
    """How often each pair counts, from a token mask `[B, T]`."""
    mask = np.asarray(mask)
    if layout is None:
        return np.repeat(mask[:, None, None, :], queries, axis=2)
    num_blocks = mask.shape[1] // layout.block_size
    counts = oracle.pattern(layout, num_blocks)
    return counts * mask[:, None, :, None] * mask[:, None, None, :]


def assert_equals_oracle(results, inputs, weights, keep=1.0):
    dtype = inputs[0].dtype.name
    *inputs, upstream = (tf.cast(x, tf.float64).numpy() for x in inputs)
    expected = [
        oracle.attention(*inputs, weights, keep)[0],
        *oracle.attention_gradients(*inputs, weights, upstream, keep),
    ]
    scales = oracle.rounding_scales(*inputs, weights, upstream, keep)
    for got, exact, scale in zip(results, expected, scales, strict=True):
        assert got.dtype == dtype
        error = np.abs(tf.cast(got, tf.float64) - exact)
        np.testing.assert_array_less(error, ROUNDINGS * ROUNDOFF[dtype] * scale + 1e-30)


def test_the_oracle_gradients_are_central_differences():
    rng = np.random.default_rng(0)
    *inputs, upstream = [x.numpy().astype(float) for x in draw_inputs(rng, 1, 1, 3, 4, 2)]
    weights, keep = rng.integers(0, 3, [3, 4]), rng.integers(0, 2, [3, 4]) / 0.5
    gradients = oracle.attention_gradients(*inputs, weights, upstream, keep)
    step = 1e-6
    for number, gradient in enumerate(gradients):
        for index in np.ndindex(gradient.shape):
            sums = []
            for sign in (1, -1):
                moved = [x.copy() for x in inputs]
                moved[number][index] += sign * step
                sums.append((upstream * oracle.attention(*moved, weights, keep)[0]).sum())
            assert gradient[index] == pytest.approx((sums[0] - sums[1]) / (2 * step), abs=1e-7)


@settings(max_examples=25)
@given(st.data())
def test_sparse_attention_equals_the_float64_oracle(data):
    """Any length up to the layout's, pattern, heads, masks, dtypes and budgets."""
    rng = np.random.default_rng(data.draw(st.integers(0, 9999)))
    batch, num_heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    num_blocks, block_size = data.draw(st.integers(4, 9)), data.draw(st.sampled_from([1, 2, 5]))
    options = PatternOptions(
        num_window_blocks=data.draw(st.sampled_from([1, 3, 5])),
        num_global_blocks=data.draw(st.integers(1, 2)),
        global_token_positions=data.draw(st.sampled_from([(), (block_size * 2,)])),
    )
    num_random = data.draw(st.integers(0, 3))
    layout = draw_layout(rng, num_heads, num_blocks, block_size, num_random, options)
    length = data.draw(st.integers(1, num_blocks)) * block_size
    mask = rng.random([batch, length]) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    dtype = data.draw(st.sampled_from(["float32", "float32", "bfloat16", "float16"]))
    inputs = draw_inputs(rng, batch, num_heads, length, length, 4, dtype)

    budget = data.draw(st.sampled_from([1, 4000, 2**20]))
    results = output_and_gradients(*inputs, mask, layout, memory_budget_bytes=budget)
    assert_equals_oracle(results, inputs, oracle_weights(mask, layout))


@settings(max_examples=12)
@given(st.data())
def test_dense_attention_equals_the_float64_oracle(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 9999)))
    queries, keys = data.draw(st.integers(1, 140)), data.draw(st.integers(1, 140))
    dtype = data.draw(st.sampled_from(["float32", "float32", "bfloat16", "float16"]))
    inputs = draw_inputs(rng, 2, 2, queries, keys, 4, dtype)
    mask = rng.random([2, keys]) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))

    budget = data.draw(st.sampled_from([1, 10**6, 2**24]))
    results = output_and_gradients(*inputs, mask, memory_budget_bytes=budget)
    assert_equals_oracle(results, inputs, oracle_weights(mask, queries=queries))


@pytest.mark.parametrize("mode", ["graph", "xla"])
@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_a_function_of_unknown_batch_and_length_serves_every_input(kind, mode):
    rng = np.random.default_rng(1)
    layout = draw_layout(rng) if kind == "sparse" else None
    tensors = tf.TensorSpec([None, 2, None, 4])

    @tf.function(
        input_signature=[tensors] * 4 + [tf.TensorSpec([None, None], tf.bool)], **MODES[mode]
    )
    def step(query, key, value, upstream, mask):
        return output_and_gradients(query, key, value, upstream, mask, layout)

    for batch, length in [(2, 32), (1, 32), (3, 12), (1, 4)]:
        inputs = draw_inputs(rng, batch, 2, length, length, 4)
        mask = rng.random([batch, length]) < 0.7
        expected = oracle_weights(mask, layout, queries=length)
        assert_equals_oracle(step(*inputs, tf.constant(mask)), inputs, expected)
    assert step.experimental_get_tracing_count() == 1


@pytest.mark.parametrize("mode", MODES)
def test_dropout_has_the_same_mask_forward_and_backward(mode):
    rng = np.random.default_rng(2)
    layout = draw_layout(rng)
    inputs = draw_inputs(rng, 2, 2, 32, 32, 32)
    mask = rng.random([2, 32]) < 0.8
    weights = oracle_weights(mask, layout)

    def step(*inputs):
        options = {"dropout_rate": 0.4, "dropout_seed": SEED, "memory_budget_bytes": 10**4}
        return output_and_gradients(*inputs, mask, layout, **options)

    # Equal scores and one-hot values of 1 / probability make the output the dropout factors.
    _, probabilities = oracle.attention(*(0 * x for x in inputs[:3]), weights)
    zeros = tf.zeros_like(inputs[0])
    factors, *_ = step(zeros, zeros, tf.eye(32, batch_shape=[2, 2]), zeros)
    keep = np.round(factors / np.where(weights > 0, probabilities, 1.0), 5)

    np.testing.assert_allclose(np.unique(keep[weights > 0]), [0, 1 / 0.6], rtol=1e-5)
    function = step if mode == "eager" else tf.function(step, **MODES[mode])
    assert_equals_oracle(function(*inputs), inputs, weights, keep=(keep > 0) / 0.6)


def test_dropout_depends_on_seed_and_pair_and_not_on_layout_or_budget():
    rng = np.random.default_rng(3)
    everything = np.tile(np.arange(8), [2, 8, 1])
    everything[:, [0, -1]] = ABSENT
    inputs = draw_inputs(rng, 2, 2, 32, 32, 4)

    def step(layout, seed, budget=2**20):
        options = {"dropout_rate": 0.3, "dropout_seed": seed, "memory_budget_bytes": budget}
        return np.concatenate(output_and_gradients(*inputs, None, layout, **options))

    dense = step(None, SEED)
    for same in (step(None, SEED, 1), step(BlockLayout(4, everything, np.array([0, 7])), SEED)):
        np.testing.assert_allclose(same, dense, atol=1e-5)
    assert np.abs(step(None, [3, 5]) - dense).max() > 0.1


def test_dropout_drops_the_given_share_independently():
    length, rate = 512, 0.25
    zeros = tf.zeros([1, 2, length, length])
    values = tf.eye(length, batch_shape=[1, 2])
    output = attend(zeros, zeros, values, dropout_rate=rate, dropout_seed=SEED)
    dropped = (output.numpy() == 0).astype(float)
    # Four standard deviations of the mean of that many draws.
    assert dropped.mean() == pytest.approx(rate, abs=4 * (0.19 / dropped.size) ** 0.5)
    # Independence: of the cell below, beside and across the heads, and of four in a square.
    centred = dropped - rate
    above, below = centred[..., :-1, :], centred[..., 1:, :]
    square = above[..., :-1] * above[..., 1:] * below[..., :-1] * below[..., 1:]
    beside = centred[..., 1:] * centred[..., :-1]
    for product in (above * below, beside, centred[:, 0] * centred[:, 1], square):
        assert abs(product.mean()) < 4 * product.std() / product.size**0.5


def test_scores_of_thousands_do_not_overflow():
    rng = np.random.default_rng(4)
    layout = draw_layout(rng)
    query, key, value, upstream = draw_inputs(rng, 1, 2, 32, 32, 4)
    inputs = (query * 50, key * 50, value, upstream)
    mask = rng.random([1, 32]) < 0.7
    output, *gradients = output_and_gradients(*inputs, mask, layout)
    expected, _ = oracle.attention(*(x.numpy() for x in inputs[:3]), oracle_weights(mask, layout))
    # A score of 5,000 has an error of 5,000 roundoffs, which its exponential multiplies.
    np.testing.assert_allclose(output, expected, atol=5e-3)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_padding_does_not_change_real_tokens():
    rng = np.random.default_rng(5)
    layout = draw_layout(rng)
    inputs = draw_inputs(rng, 1, 2, 32, 32, 4)
    real = tf.constant(np.arange(32) < 19)[tf.newaxis]
    column = real[:, tf.newaxis, :, tf.newaxis]
    changed = [tf.where(column, x, 1e4) for x in inputs]
    for before, after in zip(
        output_and_gradients(*inputs, real, layout),
        output_and_gradients(*changed, real, layout),
        strict=True,
    ):
        np.testing.assert_array_equal(before, after)
        np.testing.assert_array_equal(tf.where(column, 0.0, after), 0.0)


def test_a_cropped_input_equals_the_padded_one():
    rng = np.random.default_rng(6)
    layout = draw_layout(rng)
    inputs = draw_inputs(rng, 1, 2, 32, 32, 4)
    real = tf.constant(np.arange(32) < 20)[tf.newaxis]
    padded = output_and_gradients(*inputs, real, layout)
    cropped = output_and_gradients(*(x[:, :, :20] for x in inputs), None, layout)
    for whole, part in zip(padded, cropped, strict=True):
        np.testing.assert_allclose(whole[:, :, :20], part, atol=1e-6)


def test_an_eager_tape_keeps_no_score(monkeypatch):
    rng = np.random.default_rng(7)
    query, key, value, _ = draw_inputs(rng, 1, 2, 32, 32, 4)
    scores = []

    def masked_scores(*args, original=attention_core._masked_scores):
        tensor = original(*args)
        scores.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(attention_core, "_masked_scores", masked_scores)
    with tf.GradientTape() as tape:
        tape.watch([query, key, value])
        output = attend(query, key, value, None, draw_layout(rng))
        gc.collect()
        assert scores and not any(reference() is not None for reference in scores)
    assert tape.gradient(output, query) is not None


def test_planned_memory_has_no_room_for_probabilities():
    def step(query):
        return output_and_gradients(*[query] * 4, memory_budget_bytes=2**17)

    plan = planned_memory(step, tf.TensorSpec([1, 1, 4096, 4]))
    assert plan.total_bytes < 4096 * 4096 * 4 / 8


def test_planned_memory_grows_linearly_with_the_length():
    def planned(num_blocks):
        layout = draw_layout(np.random.default_rng(8), 1, num_blocks, 8, 2)

        def step(query):
            return output_and_gradients(*[query] * 4, None, layout, memory_budget_bytes=2**14)

        return planned_memory(step, tf.TensorSpec([1, 1, 8 * num_blocks, 8])).total_bytes

    assert planned(256) < 4.2 * planned(64)


def test_a_recomputed_layer_adds_no_loop_buffers_to_the_plan():
    """XLA makes buffers that begin as constants for all layers at once, before the first."""
    num_blocks, block_size, width = 64, 8, 8
    layout = draw_layout(np.random.default_rng(12), 1, num_blocks, block_size, 2)
    shape = [1, 1, num_blocks * block_size, width]

    def planned(num_layers):
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                output = x
                for _ in range(num_layers):
                    attention = recompute_grad(
                        lambda x: attend(x, x, x, None, layout, memory_budget_bytes=2**14)
                    )
                    output = attention(output)
            return tape.gradient(output, x)

        return planned_memory(step, tf.TensorSpec(shape)).temporary_bytes

    # A layer keeps its input; there is room for one tensor more, and not for a loop's results.
    assert planned(4) - planned(1) < 3 * 2 * np.prod(shape) * 4


@pytest.mark.parametrize("mode", MODES)
def test_a_recomputed_layer_attends_twice_and_goes_back_once(monkeypatch, mode):
    rng = np.random.default_rng(9)
    layout = draw_layout(rng)
    *inputs, upstream = draw_inputs(rng, 1, 2, 32, 32, 4)
    calls = []

    def count(name):
        original = getattr(attention_core, name)

        def counted(*args):
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(attention_core, name, counted)

    count("_forward")
    count("_backward")

    def layer(query, key, value):
        seed = get_recompute_context().next_seed("attention")
        return attend(query, key, value, None, layout, dropout_rate=0.2, dropout_seed=seed)

    def step(function):
        def forward_and_backward(*inputs):
            with RecomputeContext(seed=tf.constant([1, 2])), tf.GradientTape() as tape:
                tape.watch(inputs)
                output = function(*inputs)
            return output, *tape.gradient(output, inputs, output_gradients=upstream)

        return forward_and_backward

    recomputed = step(recompute_grad(layer))
    results = (recomputed if mode == "eager" else tf.function(recomputed, **MODES[mode]))(*inputs)
    assert calls == ["_forward", "_forward", "_backward"]
    for got, expected in zip(results, step(layer)(*inputs), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-6)


def test_layers_of_equal_shapes_share_one_trace():
    rng = np.random.default_rng(13)
    layouts = [model_layout(1024, 16, 1, 4, seed) for seed in range(2)]
    extra = [tile_tables(layout)[1].extra for layout in layouts]
    assert len(extra[0]) != len(extra[1])
    inputs = draw_inputs(rng, 1, 4, 1024, 1024, 5)

    @tf.function
    def step(*inputs):
        return [output_and_gradients(*inputs, None, layout) for layout in layouts]

    for results, layout in zip(step(*inputs), layouts, strict=True):
        assert_equals_oracle(results, inputs, oracle_weights(np.ones([1, 1024]), layout))
    called = [call.get_attr("f").name for call in _calls(step.get_concrete_function(*inputs))]
    assert len(called) == 4
    assert len(set(called)) == 2


def _calls(concrete_function):
    return [op for op in concrete_function.graph.get_operations() if "PartitionedCall" in op.type]


def test_large_passes_are_compiled_where_the_graph_is_not(monkeypatch):
    monkeypatch.setattr(attention_core, "COMPILED_SCORES", 1)
    rng = np.random.default_rng(14)
    layout = draw_layout(rng)
    inputs = draw_inputs(rng, 2, 2, 32, 32, 4)

    def step(*inputs):
        return output_and_gradients(*inputs, None, layout)

    graph = tf.function(step)
    for function in (step, graph):
        assert_equals_oracle(function(*inputs), inputs, oracle_weights(np.ones([2, 32]), layout))
    calls = _calls(graph.get_concrete_function(*inputs))
    assert len(calls) == 2
    assert all(call.get_attr("_XlaMustCompile") for call in calls)


@pytest.mark.parametrize("mode", ["eager", "graph", "compiled"])
def test_a_second_derivative_is_an_error_and_not_a_wrong_number(monkeypatch, mode):
    monkeypatch.setattr(attention_core, "COMPILED_SCORES", 1 if mode == "compiled" else 2**22)
    *inputs, _ = draw_inputs(np.random.default_rng(10), 1, 1, 4, 4, 4)

    def derivatives(query, key, value, order):
        with tf.GradientTape() as outer:
            outer.watch(query)
            with tf.GradientTape() as inner:
                inner.watch(query)
                output = attend(query, key, value, dropout_rate=0, memory_budget_bytes=np.int64(1))
            gradient = inner.gradient(output, query)
        return gradient if order == 1 else outer.gradient(gradient, query)

    function = derivatives if mode == "eager" else tf.function(derivatives, autograph=False)
    assert np.isfinite(function(*inputs, order=1)).all()
    with pytest.raises(LookupError, match="no second derivative"):
        function(*inputs, order=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": tf.zeros([1, 2, 32, 5])}, r"key float32 \(1, 2, 32, 5\)"),
        ({"value": tf.zeros([1, 2, 28, 4])}, r"value float32 \(1, 2, 28, 4\)"),
        ({"value": tf.zeros([1, 2, 32, 4], tf.float16)}, "of one dtype"),
        ({"token_mask": tf.ones([1, 31], tf.bool)}, r"token_mask \(1, 31\)"),
        ({"length": 30}, "whole blocks"),
        ({"length": 36}, "1 to 8 blocks of 4 tokens"),
        ({"num_heads": 3}, "The layout is for 2 heads"),
        ({"dropout_rate": 1.0, "dropout_seed": SEED}, r"\[0, 1\)"),
        ({"dropout_rate": 0.1}, "dropout_seed"),
    ],
)
def test_what_does_not_fit_is_named(changes, message):
    shape = [1, changes.pop("num_heads", 2), changes.pop("length", 32), 4]
    arguments = {name: tf.zeros(shape) for name in ("query", "key", "value")} | changes
    with pytest.raises(ValueError, match=message):
        attend(**arguments, layout=draw_layout(np.random.default_rng(11)))
