"""Recomputation repeats the forward pass exactly, in every mode, and in the right order."""

import os
import pathlib
import re
import subprocess
import sys
import weakref

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from hypothesis import given, settings
from hypothesis import strategies as st

from bigbird.core.memory import planned_memory
from bigbird.core.recompute_grad import (
    Recompute,
    RecomputeContext,
    RecomputingDropout,
    add_gradient_recomputation,
    after,
    get_recompute_context,
    is_recomputed,
    recompute_grad,
    stateless_dropout,
)

MODES = {
    "eager": lambda f: f,
    "graph": tf.function,
    "xla": lambda f: tf.function(f, jit_compile=True),
}
SEED = (20, 21)

every_mode = pytest.mark.parametrize("mode", list(MODES))
uncompiled_modes = pytest.mark.parametrize("mode", ["eager", "graph"])


def gradients(f, mode, tensors, variables=()):
    """Returns the outputs of f(*tensors), and the gradients of their sum, computed in `mode`."""

    def step(*tensors):
        with tf.GradientTape() as tape:
            tape.watch([x for x in tensors if x.dtype.is_floating])
            outputs = f(*tensors)
            loss = tf.add_n([tf.reduce_sum(y) for y in tf.nest.flatten(outputs) if is_float(y)])
        return outputs, tape.gradient(loss, [*tensors, *variables])

    return MODES[mode](step)(*tensors)


def is_float(y):
    return isinstance(y, tf.Tensor) and y.dtype.is_floating


# ------------------------------------------------------------------------------ arguments


@every_mode
def test_one_tensor_passed_twice_counts_each_place_once(mode):
    x = tf.constant([2.0, 3.0])
    _, (dx,) = gradients(lambda x: recompute_grad(tf.multiply)(x, x), mode, [x])
    np.testing.assert_array_equal(dx, [4, 6])


@every_mode
def test_nested_arguments_of_every_kind_keep_their_structure(mode):
    def f(x, scale, options, *, training, name, missing=None):
        assert training is True and name == "block" and missing is None
        y = x * scale * options["factors"][0] if options["use"] else x
        return {"y": y, "name": name, "missing": missing, "ids": options["ids"] + 1}

    def call(f):
        def with_arguments(x, z):
            options = {"factors": (z, None), "use": True, "ids": tf.constant([1, 2])}
            return f(x, 0.5, options, training=True, name="block", missing=None)

        return with_arguments

    tensors = [tf.constant([2.0, 3.0]), tf.constant([5.0, 7.0])]
    expected, expected_gradients = gradients(call(f), "eager", tensors)

    def without_text(f):
        return lambda *args: {k: v for k, v in f(*args).items() if k not in ("name", "missing")}

    outputs = call(recompute_grad(f))(*tensors)
    assert outputs["name"] == "block" and outputs["missing"] is None
    received, received_gradients = gradients(without_text(call(recompute_grad(f))), mode, tensors)
    np.testing.assert_array_equal(expected["y"], received["y"])
    np.testing.assert_array_equal(received["ids"], [2, 3])
    np.testing.assert_array_equal(expected_gradients, received_gradients)


@every_mode
def test_integer_and_boolean_tensors_pass_through(mode):
    def f(x, ids, mask):
        return tf.where(mask, x, 0.0) * tf.cast(ids, tf.float32), ids * 2, tf.logical_not(mask)

    tensors = [tf.constant([2.0, 3.0]), tf.constant([3, 4]), tf.constant([True, False])]
    (y, ids, mask), (dx, _, _) = gradients(recompute_grad(f), mode, tensors)
    np.testing.assert_array_equal(y, [6, 0])
    np.testing.assert_array_equal(ids, [6, 8])
    np.testing.assert_array_equal(mask, [False, True])
    np.testing.assert_array_equal(dx, [3, 0])


@uncompiled_modes
def test_strings_and_ragged_and_sparse_tensors_pass_through(mode):
    def f(text, ragged, sparse):
        return tf.strings.join([text, text]), ragged * ragged, tf.sparse.reduce_sum(sparse)

    def on_composites(x):
        ragged = tf.RaggedTensor.from_row_lengths(x, [1, 1])
        sparse = tf.SparseTensor([[0], [2]], x, [3])
        text, squares, total = recompute_grad(f)(tf.constant("a"), ragged, sparse)
        return text, squares.flat_values, total

    (text, _, total), (dx,) = gradients(on_composites, mode, [tf.constant([2.0, 3.0])])
    assert text.numpy() == b"aa"
    assert total.numpy() == 5
    np.testing.assert_array_equal(dx, [5, 7])


@every_mode
def test_empty_tensors_have_empty_gradients(mode):
    weight = tf.Variable([2.0, 3.0])
    f = recompute_grad(lambda x: x * weight)
    _, (dx, dw) = gradients(f, mode, [tf.zeros([0, 2])], [weight])
    assert dx.shape == [0, 2]
    np.testing.assert_array_equal(dw, [0, 0])


@pytest.mark.parametrize("jit_compile", [False, True])
def test_unknown_static_shapes(jit_compile):
    signature = [tf.TensorSpec([None, None]), tf.TensorSpec([None, 2])]

    @tf.function(input_signature=signature, jit_compile=jit_compile)
    def step(x, w):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y = recompute_grad(tf.matmul)(x, w)
        return tape.gradient(y, [x, w])

    dx, dw = step(tf.ones([4, 3]), tf.ones([3, 2]))
    np.testing.assert_array_equal(dx, np.full([4, 3], 2))
    np.testing.assert_array_equal(dw, np.full([3, 2], 4))


@every_mode
def test_unconnected_arguments_and_outputs_without_gradient(mode):
    f = recompute_grad(lambda x, unused: (x * 3, x * 5, tf.constant(7.0)))

    def step(x, unused):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([x, unused])
            used, _, _ = f(x, unused)
        assert tape.gradient(used, unused) is None
        return tape.gradient(used, x)

    dx = MODES[mode](step)(tf.constant([2.0, 3.0]), tf.constant([5.0]))
    np.testing.assert_array_equal(dx, [3, 3])


@every_mode
def test_sparse_gradients_in_and_out(mode):
    table = tf.Variable([[1.0, 2.0], [3.0, 4.0]])

    def f(x, ids):
        return tf.gather(x, ids) * tf.gather(table, ids), x

    def gathered_again(x, ids):
        y, z = recompute_grad(f)(x, ids)
        return y, tf.gather(z, [1])

    def step(x):
        _, (dx, _, dw) = gradients(gathered_again, "eager", [x, tf.constant([0, 0])], [table])
        return dx, tf.convert_to_tensor(dw)

    dx, dw = MODES[mode](step)(tf.constant([[5.0, 6.0], [7.0, 8.0]]))
    np.testing.assert_array_equal(dx, [[2, 4], [1, 1]])
    np.testing.assert_array_equal(dw, [[10, 12], [0, 0]])


# ------------------------------------------------------------------------------ variables


@every_mode
def test_trainable_frozen_and_passed_variables(mode):
    trainable, passed = tf.Variable([2.0, 3.0]), tf.Variable([5.0, 7.0])
    frozen = tf.Variable([11.0, 13.0], trainable=False)

    def f(x, v):
        return x * trainable * frozen * v

    def with_variable(x):
        return recompute_grad(f)(x, passed)

    x = tf.constant([1.0, 2.0])
    _, (dx, *dv) = gradients(with_variable, mode, [x], [trainable, passed, frozen])
    np.testing.assert_array_equal(dx, [110, 273])
    np.testing.assert_array_equal(dv[0], [55, 182])
    np.testing.assert_array_equal(dv[1], [22, 78])
    assert dv[2] is None


@every_mode
def test_variables_created_on_the_first_call(mode):
    dense = keras.layers.Dense(2, kernel_initializer="ones")
    made = []

    def f(x):
        if not made:
            made.append(tf.Variable([3.0, 4.0]))
        return dense(x) * made[0]

    def step(x):
        with tf.GradientTape() as tape:
            y = recompute_grad(f)(x)
        return tape.gradient(y, [dense.kernel, *made])

    kernel, scale = MODES[mode](step)(tf.ones([5, 2]))
    np.testing.assert_array_equal(kernel, [[15, 20], [15, 20]])
    np.testing.assert_array_equal(scale, [10, 10])


# ------------------------------------------------------------------------------ repeated gradients


@every_mode
def test_persistent_tapes_give_the_same_gradient_each_time(mode):
    dropout = RecomputingDropout(0.5, name="dropout")
    f = recompute_grad(lambda x: dropout(x, training=True) * x)

    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = f(x)
        return y, tape.gradient(y, x), tape.gradient(y, x)

    y, first, second = MODES[mode](step)(tf.ones([64]))
    np.testing.assert_array_equal(first, 2 * y)
    np.testing.assert_array_equal(second, first)


@every_mode
def test_second_derivatives_of_nested_recomputation(mode):
    weight = tf.Variable([1.0, 2.0])

    def derivatives(wrap):
        f = wrap(lambda x: wrap(lambda y: weight * y**3)(x) * x)

        def step(x):
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = f(x)
                first = inner.gradient(y, [x, weight])
                total = tf.reduce_sum(first[0]) + tf.reduce_sum(first[1])
            return *first, *outer.gradient(total, [x, weight])

        return MODES[mode](step)(tf.constant([2.0, 3.0]))

    np.testing.assert_allclose(
        tf.stack(derivatives(recompute_grad)), tf.stack(derivatives(lambda f: f)), rtol=1e-6
    )


@every_mode
def test_both_runs_know_that_they_are_recomputed(mode):
    inside = []

    def f(x):
        inside.append((is_recomputed(), getattr(get_recompute_context(), "is_recomputing", None)))
        return x * x

    gradients(recompute_grad(f), mode, [tf.ones([2])])
    assert inside == [(True, False), (True, True)]
    with pytest.raises(ValueError, match="must return a tf.Tensor"):
        recompute_grad(lambda x: None)(tf.ones([2]))
    gradients(f, mode, [tf.ones([2])])
    assert inside[2:] == [(False, None)]


# ------------------------------------------------------------------------------ control flow


@every_mode
def test_gradients_through_loops_and_branches_reach_variables(mode):
    weight = tf.Variable([1.0, 2.0])
    offset = tf.Variable([3.0, 5.0], trainable=False)

    def loop(f):
        def run(x, scale):
            def body(i, h):
                return [i + 1, tf.cond(i < 2, lambda: f(h, scale), lambda: h * 2)]

            return tf.while_loop(lambda i, h: i < 3, body, [0, x], maximum_iterations=3)[1]

        return run

    def f(h, scale):
        return tf.sin(h) * weight * scale + offset

    tensors = [tf.constant([2.0, 3.0]), tf.constant(0.5)]
    _, expected = gradients(loop(f), "eager", tensors, [weight])
    _, received = gradients(loop(recompute_grad(f)), mode, tensors, [weight])
    for a, b in zip(expected, received, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@every_mode
def test_a_tape_inside_a_loop(mode):
    weight = tf.Variable([1.0, 2.0])
    f = recompute_grad(recompute_grad(lambda x: weight * x**2))

    def step(x):
        def body(i, total):
            with tf.GradientTape() as tape:
                y = f(x * tf.cast(i, tf.float32))
            return [i + 1, total + tape.gradient(y, weight)]

        return tf.while_loop(lambda i, _: i < 3, body, [0, tf.zeros([2])])[1]

    np.testing.assert_array_equal(MODES[mode](step)(tf.constant([2.0, 3.0])), [20, 45])


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_dropout_inside_a_loop_is_repeated(mode):
    dropout = RecomputingDropout(0.5, name="dropout")
    f = recompute_grad(lambda x: dropout(x, training=True) * x)

    def loop(x):
        def body(i, h):
            return [i + 1, f(h)]

        return tf.while_loop(lambda i, h: i < 1, body, [0, x], maximum_iterations=1)[1]

    y, (dx,) = gradients(loop, mode, [tf.ones([64])])
    np.testing.assert_array_equal(dx, 2 * y)


def test_autograph_converts_the_wrapped_function_in_both_runs():
    def f(x, double):
        if double:
            y = x * 2
        else:
            y = x * 3
        return y

    @tf.function
    def step(x, double):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = recompute_grad(f)(x, double)
        return tape.gradient(y, x)

    x = tf.constant([2.0])
    assert step(x, tf.constant(True)) == 2
    assert step(x, tf.constant(False)) == 3


# ------------------------------------------------------------------------------ order


@settings(max_examples=20)
@given(
    bits=st.lists(st.integers(0, 2**64 - 1), min_size=8, max_size=8),
    gradient_bits=st.lists(st.integers(0, 2**64 - 1), min_size=8, max_size=8),
)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_waiting_for_a_gradient_changes_no_bit(jit_compile, bits, gradient_bits):
    words = np.array(bits, np.uint64), np.array(gradient_bits, np.uint64)
    for early, late in _WAIT[jit_compile](*words):
        np.testing.assert_array_equal(early, late)


def _wait_for_gradients_of_every_dtype(words, gradient_words):
    pairs = []
    for dtype, bits in [
        (tf.float16, tf.uint16),
        (tf.bfloat16, tf.uint16),
        (tf.float32, tf.uint32),
        (tf.float64, tf.uint64),
    ]:
        x = tf.bitcast(tf.cast(words, bits), dtype)
        dy = tf.bitcast(tf.cast(gradient_words, bits), dtype)
        integers, flags = tf.cast(words, tf.int32), words > 5
        late, late_integers, late_flags = after([dy], [x, integers, flags])
        pairs += [
            (tf.bitcast(x, bits), tf.bitcast(late, bits)),
            (integers, late_integers),
            (flags, late_flags),
        ]
    z = tf.complex(tf.cast(words, tf.float32), -0.0)
    (late,) = after([z], [z])
    return [
        *pairs,
        *[(tf.bitcast(part(z), tf.uint32), tf.bitcast(part(late), tf.uint32)) for part in _PARTS],
    ]


_PARTS = (tf.math.real, tf.math.imag)
_WAIT = {
    jit: tf.function(
        _wait_for_gradients_of_every_dtype,
        input_signature=[tf.TensorSpec([8], tf.uint64)] * 2,
        jit_compile=jit,
    )
    for jit in (False, True)
}


@every_mode
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_huge_and_infinite_gradients_leave_other_elements_alone(mode, dtype):
    f = recompute_grad(lambda x: x * x)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        return tape.gradient(y, x, output_gradients=tf.constant([1000.0, np.inf, 1.0], x.dtype))

    dx = MODES[mode](step)(tf.ones([3], dtype))
    np.testing.assert_array_equal(tf.cast(dx, tf.float32), [2000, np.inf, 2])


def _feed_forward(x, w):
    return x + tf.matmul(tf.tanh(tf.matmul(x, w)), w, transpose_b=True)


def _deep_step(wrap):
    weights = [tf.Variable(tf.random.stateless_normal([16, 64], [0, i])) for i in range(4)]

    @tf.function(jit_compile=True)
    def step(x):
        with tf.GradientTape() as tape:
            for w in weights:
                x = wrap(_feed_forward)(x, w)
            loss = tf.reduce_sum(x**2)
        return tape.gradient(loss, weights)

    return step, tf.TensorSpec([256, 16])


# Matrix products in the order of execution: M of a layer, G of a gradient. A layer has two products
# and its gradient four, that of the first layer three; all but one of those need the first product
# of the layer again.
@pytest.mark.parametrize(
    "wrap, order",
    [
        (lambda f: f, "MM" * 4 + "GGGG" * 3 + "GGG"),
        (recompute_grad, "MM" * 4 + "(MGGGG|GMGGG)" * 3 + "(MGGG|GMGG)"),
    ],
    ids=["kept", "recomputed"],
)
def test_the_compiled_program_recomputes_each_layer_when_its_gradient_arrives(wrap, order):
    step, spec = _deep_step(wrap)
    program = step.experimental_get_compiler_ir(spec)(stage="optimized_hlo")
    assert "is_scheduled=true" in program
    entry = program[program.index("\nENTRY ") :]
    products = re.findall(r"^.* dot\(.*op_name=\"([^\"]*)\"", entry, re.MULTILINE)
    scheduled = "".join("G" if "gradient_tape" in name else "M" for name in products)
    assert re.fullmatch(order, scheduled), scheduled


def test_recomputation_lowers_the_planned_temporaries():
    kept, recomputed = (planned_memory(*_deep_step(wrap)) for wrap in (lambda f: f, recompute_grad))
    # Of four layers the tanh [256, 64] is kept, or that of one layer at a time.
    assert kept.temporary_bytes - recomputed.temporary_bytes >= 2 * 256 * 64 * 4


def test_the_graph_executor_recomputes_each_layer_when_its_gradient_arrives():
    events = []

    def layer(x, name):
        def log(x):
            events.append(name)
            return x

        return tf.stop_gradient(tf.numpy_function(log, [x], tf.float32)) * x

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for name in "abc":
                y = recompute_grad(layer)(y, name)
        return tape.gradient(y, x)

    step(tf.ones([2]))
    assert "".join(events) == "abccba"


def test_the_draws_of_a_dropout_wait_for_its_input():
    """They need nothing but a seed: a scheduler could make those of all layers first."""

    def planned(layers):
        def f(x, w):
            for i in range(layers):
                x = stateless_dropout(tf.matmul(x, w), 0.5, (0, i))
            return x

        specs = tf.TensorSpec([256, 64]), tf.TensorSpec([64, 64])
        return planned_memory(f, *specs).temporary_bytes

    assert planned(8) - planned(2) < 256 * 64 * 4


def test_an_eager_tape_holds_no_intermediate():
    intermediates = []

    def f(x):
        y = tf.sin(x)
        intermediates.append(weakref.ref(y))
        return tf.cos(y)

    def is_held(f):
        intermediates.clear()
        x = tf.ones([2])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        held = intermediates[0]() is not None
        assert tape.gradient(y, x) is not None
        return held

    assert is_held(f)
    assert not is_held(recompute_grad(f))


# ------------------------------------------------------------------------------ randomness


@every_mode
def test_recomputation_reuses_the_forward_dropout_mask(mode):
    dropout = RecomputingDropout(0.5)
    f = recompute_grad(lambda x: dropout(x, training=True) * x)
    y, (dx,) = gradients(f, mode, [tf.ones([64])])
    assert 0 < np.count_nonzero(y) < 64
    np.testing.assert_array_equal(dx, 2 * y)


@every_mode
def test_masks_are_the_same_with_and_without_recomputation(mode):
    first, second = RecomputingDropout(0.5, name="first"), RecomputingDropout(0.5, name="second")

    def network(wrap):
        def run(x):
            with RecomputeContext(SEED):
                x = wrap(lambda x: second(wrap(first)(x, training=True), training=True))(x)
                return first(x, training=True)

        return run

    tensors = [tf.ones([512])]
    expected = gradients(network(lambda f: f), mode, tensors)
    received = gradients(network(recompute_grad), mode, tensors)
    tf.nest.map_structure(np.testing.assert_array_equal, expected, received)


def test_masks_are_the_same_in_every_mode():
    def draw(seed):
        with RecomputeContext(seed):
            return RecomputingDropout(0.5, name="dropout")(tf.ones([5, 7, 11]), training=True)

    eager, graph, compiled = (mode(draw)(tf.constant(SEED)) for mode in MODES.values())
    np.testing.assert_array_equal(eager, graph)
    np.testing.assert_array_equal(eager, compiled)


def test_masks_differ_between_layers_uses_and_steps():
    layers = [RecomputingDropout(0.5, name="one"), RecomputingDropout(0.5, seed=3, name="one")]

    def masks(step):
        with RecomputeContext(tf.stack([1, step])):
            return [tuple(d(tf.ones([64]), training=True).numpy()) for d in layers * 2]

    drawn = masks(0) + masks(1)
    assert len(set(drawn)) == len(drawn) == 8


def test_masks_depend_on_neither_retracing_nor_other_models():
    def train():
        dropout = RecomputingDropout(0.5)

        @tf.function
        def step(x, number):
            with RecomputeContext(tf.stack([1, number])):
                return dropout(x, training=True)

        return [step(tf.ones([n]), tf.constant(4))[:8].numpy() for n in (16, 32, 48)]

    first, second = train(), train()
    np.testing.assert_array_equal(first, second)


def test_without_a_context_each_call_draws_new_masks_from_the_global_generator():
    f = recompute_grad(lambda x: RecomputingDropout(0.5)(x, training=True))
    x = tf.ones([64])
    tf.random.set_seed(5)
    drawn = [f(x), f(x)]
    assert not np.array_equal(*drawn)
    tf.random.set_seed(5)
    np.testing.assert_array_equal(drawn, [f(x), f(x)])


def test_an_explicit_seed_fixes_the_masks_of_one_function():
    dropout = RecomputingDropout(0.5, force_recomputation=True, name="dropout")
    f = recompute_grad(lambda x: dropout(x, training=True), seed=7)
    np.testing.assert_array_equal(f(tf.ones([64])), f(tf.ones([64])))


def test_generators_of_the_process_are_left_alone():
    generator = tf.random.get_global_generator()
    before = generator.state.numpy(), np.random.get_state()[1].copy()
    with RecomputeContext(SEED):
        gradients(recompute_grad(RecomputingDropout(0.5)), "graph", [tf.ones([4])])
    np.testing.assert_array_equal(before[0], generator.state)
    np.testing.assert_array_equal(before[1], np.random.get_state()[1])
    assert get_recompute_context() is None


def test_the_context_says_whether_a_run_is_a_recomputation():
    runs = []

    def f(x):
        runs.append(get_recompute_context().is_recomputing)
        return x * 2

    gradients(recompute_grad(f), "eager", [tf.ones([2])])
    assert runs == [False, True]


@settings(max_examples=10)
@given(salts=st.lists(st.one_of(st.integers(0, 2**40), st.text(max_size=8)), max_size=6))
def test_a_context_continues_after_the_uses_it_is_given(salts):
    whole = RecomputeContext(SEED)
    seeds = [whole.next_seed(salt).numpy().tolist() for salt in salts]
    half = len(salts) // 2
    first = RecomputeContext(SEED)
    for salt in salts[:half]:
        first.next_seed(salt)
    rest = RecomputeContext(SEED, uses=first.uses())
    assert [rest.next_seed(salt).numpy().tolist() for salt in salts[half:]] == seeds[half:]
    assert len({tuple(seed) for seed in seeds}) == len(seeds)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dropout_keeps_the_mean(dtype):
    n, rate = 1 << 20, 0.1
    y = tf.cast(stateless_dropout(tf.ones([n], dtype), rate, SEED), tf.float64).numpy()
    # Six standard deviations of the mean, plus the rounding of 1 / 0.9 to the dtype.
    rounding = abs(float(tf.cast(tf.cast(1 / 0.9, dtype), tf.float64)) * 0.9 - 1)
    assert abs(y.mean() - 1) < 6 * np.sqrt(rate / (1 - rate) / n) + rounding


def test_dropout_rounds_each_element_of_a_narrow_dtype_once():
    x = tf.cast(tf.random.stateless_uniform([4096], SEED, 0.5, 2), tf.bfloat16)
    y = stateless_dropout(x, 0.1, SEED)
    exact = tf.cast(tf.cast(x, tf.float32) / 0.9, tf.bfloat16)
    np.testing.assert_array_equal(y[y != 0], exact[y != 0])


def test_dropout_noise_shape_shares_the_mask():
    y = stateless_dropout(tf.ones([4, 16, 3]), 0.5, SEED, noise_shape=(None, 1, None)).numpy()
    np.testing.assert_array_equal(y, np.broadcast_to(y[:, :1], y.shape))
    assert len(np.unique(y[:, 0])) == 2


def test_dropout_drops_non_finite_values_too():
    y = stateless_dropout(tf.fill([64], np.inf), 0.5, SEED).numpy()
    assert set(y) == {0, np.inf}


@every_mode
def test_dropout_takes_a_tensor_for_training(mode):
    dropout = RecomputingDropout(0.5, name="dropout")
    step = MODES[mode](lambda x, training: dropout(x, training=training))
    x = tf.ones([64])
    assert np.count_nonzero(step(x, tf.constant(True))) < 64
    np.testing.assert_array_equal(step(x, tf.constant(False)), x)


def test_dropout_restores_from_its_config():
    dropout = RecomputingDropout(0.25, noise_shape=(None, 1), seed=3, name="dropout")
    restored = RecomputingDropout.from_config(dropout.get_config())
    assert restored.get_config() == dropout.get_config()


# ------------------------------------------------------------------------------ keras


class Block(keras.layers.Layer):
    """Residual block whose dropout learns from Keras whether it trains."""

    def __init__(self, units=4, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.dense = keras.layers.Dense(units, "tanh")
        self.dropout = RecomputingDropout(0.5, name="dropout")

    def build(self, input_shape):
        self.dense.build(input_shape)
        super().build(input_shape)

    def call(self, inputs, training=None):
        return inputs + self.dropout(self.dense(inputs))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@every_mode
@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_a_recomputed_layer_equals_the_layer(mode, policy):
    keras.mixed_precision.set_global_policy(policy)
    try:
        results = []
        for layer_class in (Block, add_gradient_recomputation(Block)):
            layer = layer_class(name="block")
            layer.build([None, 4])
            layer.set_weights([np.full([4, 4], 0.3, np.float32), np.full([4], 0.1, np.float32)])

            def step(x, layer=layer):
                with tf.GradientTape() as tape, RecomputeContext(SEED):
                    y = layer(x, training=True)
                    loss = tf.reduce_mean(tf.cast(y, tf.float32)) * 2.0**10
                return y, tape.gradient(loss, layer.trainable_variables)

            results.append(MODES[mode](step)(tf.ones([8, 4])))
        (y, kept), (z, recomputed) = results
        assert y.dtype == layer.compute_dtype
        np.testing.assert_array_equal(tf.cast(y, tf.float32), tf.cast(z, tf.float32))
        for a, b in zip(kept, recomputed, strict=True):
            assert a.dtype == tf.float32
            # XLA may round differently where it fuses the second run with other operations.
            np.testing.assert_allclose(a, b, rtol=1e-6)
    finally:
        keras.mixed_precision.set_global_policy("float32")


def test_loss_scaling_trains_a_recomputed_model():
    policy = keras.mixed_precision.Policy("mixed_float16")
    # Ones keep every unit of the relu alive, and the scale is one that no gradient overflows.
    inner = keras.layers.Dense(4, "relu", kernel_initializer="ones", dtype=policy)
    model = keras.Sequential([Recompute(inner, dtype=policy), keras.layers.Dense(1)])
    optimizer = keras.mixed_precision.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=2.0**10
    )
    model.compile(optimizer, "mse")
    x, y = tf.ones([8, 3]), tf.ones([8, 1])
    model.fit(x, y, verbose=0)
    before = inner.kernel.numpy()
    losses = model.fit(x, y, epochs=3, verbose=0).history["loss"]
    assert np.isfinite(losses).all()
    assert not np.array_equal(before, inner.kernel)


def test_a_recomputed_layer_class_keeps_name_weights_and_config():
    recomputed = add_gradient_recomputation(Block)
    assert recomputed.__name__ == "Block" and issubclass(recomputed, Block)
    layer = recomputed(units=4, name="block")
    layer(tf.ones([2, 4]))
    plain = Block.from_config(layer.get_config())
    plain.build([None, 4])
    plain.set_weights(layer.get_weights())
    np.testing.assert_array_equal(plain(tf.ones([2, 4])), layer(tf.ones([2, 4])))


def _functional_model(wrap):
    inputs = keras.Input([3])
    block = keras.Sequential(
        [
            keras.layers.Dense(4, "relu", kernel_initializer="ones"),
            keras.layers.Dense(2, kernel_initializer="ones"),
        ]
    )
    return keras.Model(
        inputs, keras.layers.Dense(1, kernel_initializer="ones")(wrap(block)(inputs))
    )


def test_plain_fit_with_a_recomputed_block_gives_the_same_losses():
    histories = []
    for wrap in (lambda block: block, Recompute):
        model = _functional_model(wrap)
        model.compile(keras.optimizers.SGD(0.01), "mse")
        histories.append(model.fit(tf.ones([4, 3]), tf.ones([4, 1]), epochs=2, verbose=0).history)
    assert histories[0] == histories[1]


def test_a_model_with_a_recomputed_block_saves_and_loads(tmp_path):
    model = _functional_model(Recompute)
    model.save(tmp_path / "model.keras")
    restored = keras.models.load_model(tmp_path / "model.keras")
    x = tf.constant([[1.0, 2.0, 3.0]])
    np.testing.assert_array_equal(model(x), restored(x))


def test_masks_of_keras_pass_through_the_wrapper():
    layers = [keras.layers.Embedding(5, 3, mask_zero=True), keras.layers.LSTM(2)]
    ids = tf.constant([[1, 2, 0], [3, 0, 0]])
    expected = keras.Sequential(layers)(ids)
    np.testing.assert_array_equal(
        keras.Sequential([layers[0], Recompute(layers[1])])(ids), expected
    )


@pytest.mark.parametrize(
    "inner, expected",
    [
        (lambda: keras.layers.Dropout(0.5), "RecomputingDropout"),
        (lambda: keras.Sequential([keras.layers.GaussianNoise(0.1)]), "RecomputingDropout"),
        (lambda: keras.layers.LSTM(2, dropout=0.1), "RecomputingDropout"),
        (lambda: keras.layers.Dense(2, activity_regularizer="l2"), "activity regularizer"),
    ],
)
def test_the_wrapper_refuses_what_it_cannot_repeat(inner, expected):
    with pytest.raises(ValueError, match=expected):
        Recompute(inner())(tf.ones([2, 3, 4]))


# ------------------------------------------------------------------------------ deployment


class Exported(tf.Module):
    """A layer exported with its training pass."""

    def __init__(self):
        super().__init__()
        self.block = add_gradient_recomputation(Block)(name="block")
        self.block.build([None, 4])

    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def __call__(self, x):
        with RecomputeContext(SEED):
            return self.block(x, training=True)


def _value_and_gradient(f):
    x = tf.reshape(tf.range(12.0), [3, 4]) / 10
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = f(x)
    return y.numpy(), tape.gradient(y, x).numpy()


def _weights_trained_on_two_replicas(layer_class):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        layer = layer_class(name="block")
        layer.build([None, 4])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(layer.trainable_variables)
    layer.set_weights([np.full([4, 4], 0.3, np.float32), np.full([4], 0.1, np.float32)])

    def replica_step(x):
        with tf.GradientTape() as tape, RecomputeContext(SEED):
            loss = tf.reduce_sum(layer(x, training=True) ** 2)
        gradients = tape.gradient(loss, layer.trainable_variables)
        optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))

    tf.function(lambda: strategy.run(replica_step, [tf.ones([2, 4])]))()
    return layer.get_weights()


def _check_in_a_process_of_two_devices_and_auto_clustering(directory):
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

    test_recomputation_reuses_the_forward_dropout_mask("graph")
    test_masks_are_the_same_with_and_without_recomputation("graph")

    kept = _weights_trained_on_two_replicas(Block)
    recomputed = _weights_trained_on_two_replicas(add_gradient_recomputation(Block))
    np.testing.assert_allclose(kept[0], recomputed[0], rtol=1e-6)
    np.testing.assert_allclose(kept[1], recomputed[1], rtol=1e-6)

    value, gradient = _value_and_gradient(tf.saved_model.load(directory))
    expected = np.load(pathlib.Path(directory) / "expected.npz")
    # XLA computes tanh its own way, to within a few units in the last place of 1.
    np.testing.assert_allclose(value, expected["value"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(gradient, expected["gradient"], rtol=0, atol=1e-6)


def test_auto_clustering_two_replicas_and_a_reloaded_export(tmp_path):
    module = Exported()
    tf.saved_model.save(module, tmp_path)
    value, gradient = _value_and_gradient(module)
    np.savez(tmp_path / "expected.npz", value=value, gradient=gradient)

    flags = "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit --tf_xla_min_cluster_size=1"
    check = _check_in_a_process_of_two_devices_and_auto_clustering.__name__
    child = subprocess.run(
        [sys.executable, "-c", f"import {__name__} as tests; tests.{check}({str(tmp_path)!r})"],
        cwd=pathlib.Path(__file__).parent,
        env={**os.environ, "TF_XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    assert "Compiled cluster using XLA" in child.stderr


# ------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan"), "0.1", None])
def test_a_rate_outside_its_range_is_refused(rate):
    with pytest.raises(ValueError, match=r"in \[0, 1\)"):
        RecomputingDropout(rate)
    with pytest.raises(ValueError, match=r"in \[0, 1\)"):
        stateless_dropout(tf.ones([2]), rate, SEED)


def test_dropout_of_integers_is_refused():
    with pytest.raises(ValueError, match="int32"):
        stateless_dropout(tf.ones([2], tf.int32), 0.5, SEED)


def test_a_noise_shape_of_another_rank_is_refused():
    with pytest.raises(ValueError, match="noise_shape"):
        stateless_dropout(tf.ones([2, 3]), 0.5, SEED, noise_shape=(2,))


@pytest.mark.parametrize("seed", [[1, 2, 3], [[1, 2]], 1.5, [1.0, 2.0]])
def test_a_malformed_seed_is_refused(seed):
    with pytest.raises(ValueError, match="seed"):
        RecomputeContext(seed)
    with pytest.raises(ValueError, match="seed"):
        recompute_grad(tf.identity, seed=seed)(tf.ones([2]))
    with pytest.raises(ValueError, match="seed"):
        stateless_dropout(tf.ones([2]), 0.5, seed)


@every_mode
@pytest.mark.parametrize("output", [None, "text", 3.0, []])
def test_a_function_that_returns_no_tensor_is_refused(mode, output):
    def step(x):
        recompute_grad(lambda x: output)(x)
        return x

    with pytest.raises(ValueError, match="must return a tf.Tensor"):
        MODES[mode](step)(tf.ones([2]))


def test_a_symbolic_keras_input_is_pointed_to_the_wrapper():
    with pytest.raises(ValueError, match="Recompute"):
        recompute_grad(lambda x: x * 2)(keras.Input([3]))


def test_forced_recomputation_needs_a_context():
    dropout = RecomputingDropout(0.5, force_recomputation=True)
    with pytest.raises(ValueError, match="RecomputeContext"):
        dropout(tf.ones([2]), training=True)
