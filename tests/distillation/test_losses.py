"""Claims about `topk_kl` and `online_kl`: one loss and one gradient, however they are computed."""

import functools
import re

import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from reference import kl_oracle

from bigbird.distillation import kl_loops, kl_plan
from bigbird.distillation.losses import online_kl, topk_kl
from bigbird.distillation.targets import TopKTargets

IMPLEMENTATIONS = {
    "dense": {"implementation": "dense"},
    "forward_chunked": {"implementation": "forward_chunked"},
    "recompute": {"implementation": "fused", "gradient": "recompute"},
    "one_pass": {"implementation": "fused", "gradient": "one_pass"},
}
every_implementation = pytest.mark.parametrize("how", IMPLEMENTATIONS)
MODES = {
    "eager": lambda function: function,
    "graph": functools.partial(tf.function, autograph=False),
    "xla": functools.partial(tf.function, autograph=False, jit_compile=True),
}

TOKENS, WIDTH, VOCABULARY, KEPT = 7, 6, 11, 4
TEMPERATURE = 2.5


class Example:
    """A student, a teacher, weights with a zero, labels with a missing one: all in float64."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.hidden = rng.normal(size=(TOKENS, WIDTH))
        self.kernel = rng.normal(size=(WIDTH, VOCABULARY))
        self.bias = rng.normal(size=VOCABULARY)
        self.weight = np.array([1.0, 0.5, 0.0, 2.0, 1.0, 1.0, 3.0])
        self.labels = np.array([0, 3, 4, -1, 10, 2, 2])
        self.teacher = 3 * rng.normal(size=(TOKENS, VOCABULARY))

    def student(self):
        return [tf.constant(x, tf.float32) for x in (self.hidden, self.kernel, self.bias)]

    def targets(self):
        logits = tf.constant(self.teacher, tf.float32)
        return TopKTargets.from_logits(logits, KEPT, TEMPERATURE)

    def weighted_sum(self, tail, weight, hidden, kernel, bias):
        """Σ weight · loss in float64."""
        ids = np.argsort(-self.teacher)[:, :KEPT]
        rows = [
            (ids[n], self.teacher[n, ids[n]], kl_oracle.logsumexp(self.teacher[n] / TEMPERATURE))
            for n in range(TOKENS)
        ]
        logits = kl_oracle.student_logits(hidden, kernel, bias, 0.7, 5.0)
        losses = kl_oracle.token_losses(
            logits, rows, temperature=TEMPERATURE, tail=tail, labels=self.labels, label_weight=0.3
        )
        return weight @ losses

    def expected(self, tail, weight):
        """That sum, and central differences of it for hidden states, kernel and bias."""
        values = {"hidden": self.hidden, "kernel": self.kernel, "bias": self.bias}
        function = functools.partial(self.weighted_sum, tail, weight)
        gradients = [
            kl_oracle.central_differences(lambda x, n=name: function(**values | {n: x}), value)
            for name, value in values.items()
        ]
        return function(**values), gradients


EXAMPLE = Example()


def value_and_gradients(student, targets, weight, upstream=1.0, **options):
    """The loss, and gradients of Σ upstream · loss for hidden states, kernel and bias."""
    hidden, kernel, *bias = student
    with tf.GradientTape() as tape:
        tape.watch(student)
        options["bias"] = bias[0] if bias else None
        loss = topk_kl(hidden, kernel, targets, sample_weight=weight, **options)
        total = tf.reduce_sum(upstream * loss)
    return loss, tape.gradient(total, student)


@functools.cache
def example_loss(how, mode="graph", tail="renormalize", **options):
    """A function of student, targets, weight and upstream: traced once for all tests."""
    options = {"chunk_tokens": 3, "logit_scale": 0.7, "logit_softcap": 5.0} | options
    return MODES[mode](
        functools.partial(
            value_and_gradients,
            tail=tail,
            temperature=TEMPERATURE,
            labels=EXAMPLE.labels,
            label_weight=0.3,
            **IMPLEMENTATIONS[how],
            **options,
        )
    )


def weights(values=EXAMPLE.weight):
    return tf.constant(values, tf.float32)


def assert_close(found, expected):
    """Relative to each array as a whole: its small entries are differences of large ones."""
    for array, wanted in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(array, wanted, atol=1e-5 * np.abs(wanted).max(), rtol=0)


@pytest.mark.parametrize(
    ("how", "mode", "tail"),
    [(how, "graph", "renormalize") for how in IMPLEMENTATIONS]
    + [(how, "xla", "bucket") for how in IMPLEMENTATIONS]
    + [("recompute", "eager", "zero"), ("one_pass", "eager", "uniform")],
)
def test_mean_and_its_gradients_are_those_of_the_float64_oracle(how, mode, tail):
    found = example_loss(how, mode, tail)(EXAMPLE.student(), EXAMPLE.targets(), weights())
    assert found[0].dtype == tf.float32
    assert_close(found, EXAMPLE.expected(tail, EXAMPLE.weight / EXAMPLE.weight.sum()))


@pytest.mark.parametrize("how", ["dense", "forward_chunked", "recompute"])
def test_losses_of_single_tokens_take_any_upstream_gradient(how):
    upstream = np.array([1.0, -2.0, 3.0, 0.5, 0.0, 4.0, 1.5])
    loss, gradients = example_loss(how, reduction="none")(
        EXAMPLE.student(), EXAMPLE.targets(), weights(), tf.constant(upstream, tf.float32)
    )
    expected = EXAMPLE.expected("renormalize", EXAMPLE.weight * upstream)
    assert loss.shape == [TOKENS]
    assert_close((upstream @ loss.numpy(), gradients), expected)


@pytest.mark.parametrize("chunk_tokens", [1, 6, 100])
def test_chunk_size_does_not_change_the_result(chunk_tokens):
    arguments = (EXAMPLE.student(), EXAMPLE.targets(), weights())
    found = example_loss("one_pass", chunk_tokens=chunk_tokens)(*arguments)
    assert_close(found, example_loss("one_pass")(*arguments))


@every_implementation
def test_tokens_without_weight_do_not_matter_whatever_they_hold(how):
    student, targets = EXAMPLE.student(), EXAMPLE.targets()
    clean = example_loss(how)(student, targets, weights())
    row = np.arange(TOKENS)[:, np.newaxis] == 2  # The token with weight 0.
    for value in (1e10, -1e10, np.inf, np.nan):
        hidden = tf.where(row, value, student[0])
        broken = TopKTargets(
            tf.where(row, -5, targets.ids),
            tf.where(row, np.nan, targets.logits),
            tf.where(row[:, 0], np.nan, targets.log_z),
            VOCABULARY,
            temperature=TEMPERATURE,
        )
        found = example_loss(how)([hidden, *student[1:]], broken, weights())
        tf.nest.map_structure(np.testing.assert_array_equal, found, clean)
    np.testing.assert_array_equal(clean[1][0][2], np.zeros(WIDTH))


@every_implementation
def test_all_weights_zero_give_loss_and_gradients_zero(how):
    nothing = weights(np.zeros(TOKENS))
    found = example_loss(how)(EXAMPLE.student(), EXAMPLE.targets(), nothing)
    for array in tf.nest.flatten(found):
        np.testing.assert_array_equal(array, np.zeros(array.shape))


def test_one_pass_is_exact_under_any_scalar_upstream_gradient():
    arguments = (EXAMPLE.student(), EXAMPLE.targets(), weights())
    _, once = example_loss("one_pass")(*arguments, tf.constant(1.0))
    _, scaled = example_loss("one_pass")(*arguments, tf.constant(-3.0))
    assert_close(scaled, [-3.0 * gradient for gradient in once])


def test_micro_batches_with_their_own_denominators_add_up_to_the_whole_batch():
    student, targets = EXAMPLE.student(), EXAMPLE.targets()
    first = np.arange(TOKENS) < 1
    parts = [
        example_loss("recompute", reduction="sum")(
            student, targets, weights(EXAMPLE.weight * mask / EXAMPLE.weight.sum())
        )
        for mask in (first, ~first)
    ]
    total = tf.nest.map_structure(lambda a, b: a + b, *parts)
    assert_close(total, EXAMPLE.expected("renormalize", EXAMPLE.weight / EXAMPLE.weight.sum()))


def test_the_gradient_for_the_weights_is_that_of_the_mean():
    weight, gradients = weights(), {}
    for how in ("dense", "one_pass"):
        with tf.GradientTape() as tape:
            tape.watch(weight)
            loss, _ = example_loss(how)(EXAMPLE.student(), EXAMPLE.targets(), weight)
        gradients[how] = tape.gradient(loss, weight)
    assert_close(gradients["one_pass"], gradients["dense"].numpy())


def test_padding_a_batch_does_not_change_its_mean():
    student, targets = EXAMPLE.student(), EXAMPLE.targets()
    hidden = tf.reshape(tf.pad(student[0], [[0, 7], [0, 0]]), [2, 7, WIDTH])
    padded = TopKTargets(
        *(
            tf.reshape(tf.pad(x, [[0, 7], [0, 0]]), [2, 7, KEPT])
            for x in (targets.ids, targets.logits)
        ),
        None,
        VOCABULARY,
    )
    loss = topk_kl(
        hidden, student[1], padded, bias=student[2], sample_weight=[[True] * 7, [False] * 7]
    )
    assert_close(loss, topk_kl(student[0], student[1], targets, bias=student[2]).numpy())


@pytest.mark.parametrize(
    ("how", "mode", "numbers"), [("one_pass", "graph", [7, 2]), ("recompute", "xla", [5])]
)
def test_a_number_of_tokens_unknown_when_traced_is_handled(how, mode, numbers):
    student, targets = EXAMPLE.student()[:2], EXAMPLE.targets()
    specs = [tf.TensorSpec([None, WIDTH]), tf.TensorSpec([WIDTH, VOCABULARY])]
    rows = TopKTargets.Spec(
        ids=tf.TensorSpec([None, KEPT], tf.int32),
        logits=tf.TensorSpec([None, KEPT]),
        log_z=tf.TensorSpec([None]),
        count=None,
        vocab_size=VOCABULARY,
        temperature=TEMPERATURE,
    )
    step = functools.partial(
        value_and_gradients, weight=None, chunk_tokens=3, **IMPLEMENTATIONS[how]
    )
    traced = tf.function(step, input_signature=[specs, rows], jit_compile=mode == "xla")
    for tokens in numbers:
        arguments = [student[0][:tokens], student[1]], targets.take(0, tokens)
        expected = value_and_gradients(*arguments, None, implementation="dense")
        assert_close(traced(*arguments), tf.nest.map_structure(lambda x: x.numpy(), expected))


def test_gradients_nobody_asks_for_are_not_made(monkeypatch):
    made, add_product = [], kl_loops._add_product

    def note(*arguments):
        product = add_product(*arguments)
        # Without state, the note is itself pruned where nothing needs the product.
        noted = tf.numpy_function(
            lambda x: made.append(1) or x, [product], product.dtype, stateful=False
        )
        return tf.ensure_shape(noted, product.shape)

    monkeypatch.setattr(kl_loops, "_add_product", note)
    hidden, kernel, _ = EXAMPLE.student()

    @tf.function
    def loss(hidden, kernel):
        return topk_kl(hidden, kernel, EXAMPLE.targets(), gradient="one_pass", chunk_tokens=3)

    loss(hidden, kernel)
    assert not made
    with tf.GradientTape() as tape:
        tape.watch(kernel)
        value = loss(hidden, kernel)
    assert tape.gradient(value, kernel) is not None
    assert made


def plain_step(hidden, kernel, probabilities):
    """Loss and gradients of Σ p (log p - log q) with products and logits in the given type."""
    with tf.GradientTape() as tape:
        tape.watch([hidden, kernel])
        log_student = tf.nn.log_softmax(tf.cast(tf.matmul(hidden, kernel), tf.float32))
        loss = -tf.reduce_mean(tf.reduce_sum(probabilities * log_student, axis=-1))
    return tape.gradient(loss, [hidden, kernel])


@pytest.mark.parametrize("how", ["forward_chunked", "recompute", "one_pass"])
def test_bfloat16_gradients_are_as_close_to_float64_as_those_of_a_plain_dense_loss(
    how, monkeypatch
):
    # Four tiles of the head, which then have to be widened one by one.
    monkeypatch.setattr(kl_plan, "TILE_BYTES", 16 * 1000 * 4)
    rng = np.random.default_rng(0)
    hidden, kernel = (
        tf.cast(x, tf.bfloat16)
        for x in (rng.normal(size=(203, 64)), 0.1 * rng.normal(size=(64, 1000)))
    )
    targets = TopKTargets.from_logits(tf.constant(3 * rng.normal(size=(203, 1000)), tf.float32), 20)
    weights = tf.nn.softmax(targets.logits)
    cells = tf.stack([tf.repeat(tf.range(203)[:, tf.newaxis], 20, 1), targets.ids], axis=-1)
    probabilities = tf.scatter_nd(cells, weights, [203, 1000])
    exact_hidden, exact_kernel = (tf.cast(x, tf.float64).numpy() for x in (hidden, kernel))
    student = np.apply_along_axis(kl_oracle.softmax, 1, exact_hidden @ exact_kernel)
    logit_gradient = (student - probabilities.numpy()) / 203
    exact = [logit_gradient @ exact_kernel.T, exact_hidden.T @ logit_gradient]

    def errors(gradients):
        return [
            np.linalg.norm(tf.cast(found, tf.float64) - wanted) / np.linalg.norm(wanted)
            for found, wanted in zip(gradients, exact, strict=True)
        ]

    options = {"chunk_tokens": 64} | IMPLEMENTATIONS[how]
    _, gradients = value_and_gradients([hidden, kernel], targets, None, **options)
    assert [gradient.dtype for gradient in gradients] == [tf.bfloat16] * 2
    found, plain = errors(gradients), errors(plain_step(hidden, kernel, probabilities))
    assert max(found) < 0.01
    assert found[0] <= 1.1 * plain[0]
    assert found[1] <= 1.1 * plain[1]


@pytest.mark.parametrize("how", ["forward_chunked", "recompute", "one_pass"])
def test_the_bfloat16_heads_gradient_is_added_up_in_float32(how):
    # 1 + 1024 · 2⁻⁹ = 3; a bfloat16 sum would stay at 1, where the step is 2⁻⁷.
    hidden = tf.constant([[-2.0]] + [[-(2.0**-8)]] * 1024, tf.bfloat16)
    targets = TopKTargets([[0]] * 1025, [[0.0]] * 1025, [0.0] * 1025, 2)
    student = [hidden, tf.zeros([1, 2], tf.bfloat16)]
    options = {"reduction": "sum", "chunk_tokens": 64} | IMPLEMENTATIONS[how]
    _, (_, kernel_gradient) = value_and_gradients(student, targets, None, **options)
    np.testing.assert_array_equal(tf.cast(kernel_gradient, tf.float32), [[3.0, -3.0]])


@pytest.mark.parametrize("how", ["recompute", "one_pass"])
def test_a_float16_loss_scale_comes_before_rounding(how):
    kernel = 1e-3 * np.random.default_rng(0).normal(size=(4, 50))
    targets = TopKTargets.from_logits(tf.zeros([8, 50]), 10)
    options = {"reduction": "sum", **IMPLEMENTATIONS[how]}
    scale = 2.0**15

    def hidden_gradient(dtype):
        student = [tf.ones([8, 4], dtype), tf.constant(kernel, dtype)]
        _, gradients = value_and_gradients(student, targets, weights([2e-5] * 8), scale, **options)
        return tf.cast(gradients[0], tf.float32).numpy()

    exact = hidden_gradient(tf.float32)
    # Without the scale, float16 rounds all of it to 0.
    np.testing.assert_array_equal((exact / scale).astype(np.float16), 0.0)
    np.testing.assert_allclose(hidden_gradient(tf.float16), exact, rtol=5e-3, atol=1e-6)


@pytest.mark.parametrize("how", ["recompute", "one_pass"])
def test_compiled_program_has_no_array_of_tokens_by_vocabulary(how):
    tokens, width, vocab_size = 301, 8, 500
    targets = TopKTargets.from_logits(tf.zeros([tokens, vocab_size]), 4)

    @tf.function(jit_compile=True)
    def step(hidden, kernel):
        return value_and_gradients(
            [hidden, kernel], targets, None, chunk_tokens=64, **IMPLEMENTATIONS[how]
        )

    specs = tf.TensorSpec([tokens, width]), tf.TensorSpec([width, vocab_size])
    program = step.experimental_get_compiler_ir(*specs)(stage="optimized_hlo")
    shapes = re.findall(r"\b[a-z]\w*\[([\d,]+)\]", program)
    elements = [np.prod([int(size) for size in shape.split(",")]) for shape in shapes]
    assert 64 * vocab_size in elements
    assert max(elements) < tokens * vocab_size


def test_a_tied_head_gets_the_gradients_of_both_its_uses():
    table = tf.Variable(np.random.default_rng(0).normal(size=(VOCABULARY, WIDTH)), dtype=tf.float32)
    ids, targets = tf.constant([1, 4, 4, 0, 7, 10, 2]), EXAMPLE.targets()

    def gradient(how):
        with tf.GradientTape() as tape:
            hidden = tf.tanh(tf.gather(table, ids))
            loss = topk_kl(hidden, tf.transpose(table), targets, **IMPLEMENTATIONS[how])
        return tf.convert_to_tensor(tape.gradient(loss, table)).numpy()

    assert_close(gradient("one_pass"), gradient("dense"))


@pytest.mark.parametrize("how", ["dense", "recompute", "one_pass"])
def test_a_students_padding_columns_take_no_part(how):
    hidden, kernel, bias = EXAMPLE.student()
    options = {"chunk_tokens": 3, "labels": EXAMPLE.labels, "label_weight": 0.3}
    options |= IMPLEMENTATIONS[how]
    plain = value_and_gradients([hidden, kernel, bias], EXAMPLE.targets(), weights(), **options)
    padded = [hidden, tf.pad(kernel, [[0, 0], [0, 3]], constant_values=9.0), tf.pad(bias, [[0, 3]])]
    found = value_and_gradients(padded, EXAMPLE.targets(), weights(), **options)
    assert_close(found[0], plain[0].numpy())
    assert_close(found[1][0], plain[1][0].numpy())
    assert_close(found[1][1][:, :VOCABULARY], plain[1][1].numpy())
    np.testing.assert_array_equal(found[1][1][:, VOCABULARY:], np.zeros((WIDTH, 3)))


def test_ids_a_smaller_student_lacks_are_dropped_if_they_hold_little():
    student = [tf.zeros([1, 2]), tf.zeros([2, 4])]
    probabilities = np.array([0.6, 0.3, 0.09, 0.005, 0.004, 0.001], np.float32)
    targets = TopKTargets.from_logits([np.log(probabilities)], 6)
    loss, diagnostics = topk_kl(*student, targets, tail="zero", return_diagnostics=True)
    kept = probabilities[:4]
    np.testing.assert_allclose(loss, (kept * np.log(kept / 0.25)).sum(), rtol=1e-5)
    np.testing.assert_allclose(diagnostics["dropped_mass"], 0.005, rtol=1e-4)
    swapped = TopKTargets.from_logits([np.log(probabilities[::-1])], 6)
    with pytest.raises(ValueError, match="over 0.01 of the teacher's mass on ids of 4 and above"):
        topk_kl(*student, swapped)
    with pytest.raises(ValueError, match="over 0.01 of the teacher's mass"):
        online_kl(*student, np.log([probabilities[::-1]]))


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_a_whole_teacher_gives_what_targets_with_every_id_give(how):
    hidden, kernel, _ = EXAMPLE.student()
    logits = tf.constant(EXAMPLE.teacher, tf.float32)
    targets = TopKTargets.from_logits(logits, VOCABULARY, TEMPERATURE)
    options = {"temperature": TEMPERATURE, "chunk_tokens": 3, **IMPLEMENTATIONS[how]}
    whole = {"sample_weight": EXAMPLE.weight, "tail": "bucket", **options}
    with tf.GradientTape() as tape:
        tape.watch([hidden, kernel, logits])
        loss = online_kl(hidden, kernel, logits, **whole)
    *gradients, teacher_gradient = tape.gradient(loss, [hidden, kernel, logits])
    assert teacher_gradient is None
    expected = value_and_gradients([hidden, kernel], targets, weights(), **options)
    assert_close((loss, gradients), tf.nest.map_structure(lambda x: x.numpy(), expected))


def test_diagnostics_are_weighted_means_over_tokens():
    student = [tf.math.log([[0.1, 0.6, 0.2, 0.1], [0.7, 0.1, 0.1, 0.1]]), tf.eye(4)]
    kept = np.log([[0.5, 0.3], [0.6, 0.4]]).astype(np.float32)
    targets = TopKTargets([[0, 1], [0, 1]], kept, [0.0, 0.0], 4)
    _, found = topk_kl(*student, targets, sample_weight=[1.0, 3.0], return_diagnostics=True)
    expected = {
        "kept_mass": (0.8 + 3 * 1.0) / 4,
        "student_kept_mass": (0.7 + 3 * 0.8) / 4,
        "tail_kl": 0.2 * np.log(0.2 / 0.3) / 4,
        "argmax_agreement": 3 / 4,
        "dropped_mass": 0.0,
    }
    assert {name: float(value) for name, value in found.items()} == pytest.approx(expected, 1e-4)


def test_fifty_training_steps_fused_follow_fifty_dense_ones():
    rng = np.random.default_rng(0)
    inputs = tf.constant(rng.integers(0, 30, size=(8, 5)))
    targets = TopKTargets.from_logits(tf.constant(2 * rng.normal(size=(8, 5, 30)), tf.float32), 6)

    def losses(how):
        start = [keras.initializers.GlorotUniform(seed) for seed in (0, 1)]
        body = keras.Sequential(
            [
                keras.layers.Embedding(30, 16, embeddings_initializer=start[0]),
                keras.layers.Dense(16, "gelu", kernel_initializer=start[1]),
            ]
        )
        head = tf.Variable(tf.random.stateless_normal([16, 30], seed=[1, 2]))
        optimizer = keras.optimizers.Adam(1e-2)

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = topk_kl(body(inputs), head, targets, chunk_tokens=16, **IMPLEMENTATIONS[how])
            variables = [*body.trainable_variables, head]
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return loss

        return [float(step()) for _ in range(50)]

    fused, dense = losses("one_pass"), losses("dense")
    assert dense[-1] < 0.6 * dense[0]
    np.testing.assert_allclose(fused, dense, atol=1e-4)


def test_keras_3_variables_get_the_same_gradients():
    hidden, kernel, bias = EXAMPLE.student()
    variables = [keras3.Variable(kernel), keras3.Variable(bias)]
    with tf.GradientTape() as tape:
        loss = topk_kl(hidden, variables[0], EXAMPLE.targets(), bias=variables[1])
    gradients = tape.gradient(loss, [variable.value for variable in variables])
    expected = value_and_gradients([hidden, kernel, bias], EXAMPLE.targets(), None)
    assert_close((loss, gradients), (expected[0].numpy(), [g.numpy() for g in expected[1][1:]]))


def call(**changes):
    """A small call that is in order, but for the changes."""
    arguments = {
        "hidden": tf.zeros([2, 3]),
        "kernel": tf.zeros([3, 4]),
        "targets": TopKTargets([[0, 1]] * 2, [[2.0, 1.0]] * 2, [3.0] * 2, 4),
    }
    return topk_kl(**arguments | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": tf.zeros([2, 5])}, r"hidden must have the shape \(2, 3\).*received \(2, 5\)"),
        ({"hidden": tf.zeros([3, 3])}, r"targets.logits must have the shape \(3, None\).*\(2, 2\)"),
        ({"kernel": tf.zeros([3])}, r"kernel must be \[D, V\].*received \(3,\)"),
        ({"bias": tf.zeros([3])}, r"bias must have the shape \(4,\).*received \(3,\)"),
        ({"sample_weight": [1.0]}, r"sample_weight must have the shape \(2,\).*received \(1,\)"),
        ({"labels": [1, 2, 3]}, r"labels must have the shape \(2,\).*received \(3,\)"),
        ({"labels": [1, 4], "label_weight": 1.0}, "labels outside the vocabulary: expected ids b"),
        ({"label_weight": 0.5}, "label_weight=0.5 needs labels"),
        ({"targets": tf.zeros([2, 2])}, "targets must be TopKTargets; received EagerTensor"),
        ({"temperature": 2.0, "tail": "zero"}, "log_z at temperature 2; the targets carry it at 1"),
        ({"temperature": 0.0}, "temperature must be a finite number above 0; received 0.0"),
        ({"logit_softcap": -1.0}, "logit_softcap must be a finite number above 0"),
        ({"tail": "clamp"}, "tail must be one of renormalize, zero, bucket, uniform"),
        ({"reduction": "batch"}, "reduction must be one of mean, sum, none; received 'batch'"),
        ({"implementation": "torch"}, "implementation must be one of"),
        ({"memory_budget_bytes": 100}, "memory_budget_bytes=100 is less than the"),
    ],
)
def test_a_bad_call_is_refused_with_what_was_expected(changes, message):
    with pytest.raises(ValueError, match=message):
        call(**changes)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ({"ids": [[0, 1], [0, 4]]}, {}, "ids outside the vocabulary.*the first of them token 1"),
        ({"logits": [[np.nan, 1.0]] * 2}, {}, "NaN or"),
        ({"logits": [[1.0, 2.0]] * 2}, {}, "out of order"),
        ({"log_z": None}, {"tail": "uniform"}, "the targets carry none"),
        ({"ids": [[1, 1]] * 2}, {"tail": "bucket"}, "ids named twice"),
    ],
)
def test_faulty_targets_are_refused_with_their_token(rows, options, message):
    values = {"ids": [[0, 1]] * 2, "logits": [[2.0, 1.0]] * 2, "log_z": [3.0] * 2, "vocab_size": 4}
    with pytest.raises(ValueError, match=message):
        call(targets=TopKTargets(**values | rows), **options)


def test_another_temperature_is_taken_where_no_mass_is_needed():
    targets = TopKTargets([[0, 1]] * 2, [[2.0, 1.0]] * 2, None, 4)
    assert float(call(targets=targets, temperature=2.0)) > 0.0


def test_faulty_targets_stop_a_graph_and_make_a_compiled_loss_nan():
    faulty = TopKTargets([[0, 1], [0, 4]], [[2.0, 1.0]] * 2, [3.0] * 2, 4)
    loss = tf.function(lambda targets: call(targets=targets))
    with pytest.raises(tf.errors.InvalidArgumentError, match="ids outside the vocabulary"):
        loss(faulty)
    assert np.isnan(tf.function(lambda targets: call(targets=targets), jit_compile=True)(faulty))
