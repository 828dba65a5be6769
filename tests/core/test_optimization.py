"""Schedules and optimizers against float64 oracles, in every mode they run in."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from bigbird.core.optimization import (
    OPTIMIZERS,
    AdamWeightDecay,
    InverseSqrtWarmup,
    LinearWarmupLinearDecay,
    create_optimizer,
)

# float32 keeps 24 bits; a dozen chained updates lose a few of them.
FLOAT32 = {"rtol": 2e-6, "atol": 1e-7}


def rates(schedule, steps):
    return np.array([float(schedule(tf.constant(step, tf.int64))) for step in steps])


def test_linear_schedule_equals_the_2021_formula():
    schedule = LinearWarmupLinearDecay(0.5, num_train_steps=100, num_warmup_steps=10)
    steps = np.array([0, 1, 9, 10, 11, 50, 99, 100, 150])
    expected = np.where(steps < 10, 0.5 * steps / 10, 0.5 * np.maximum(0, 1 - steps / 100))
    np.testing.assert_allclose(rates(schedule, steps), expected, **FLOAT32)


def test_linear_schedule_without_warmup_starts_at_the_peak():
    schedule = LinearWarmupLinearDecay(0.5, num_train_steps=4)
    np.testing.assert_allclose(rates(schedule, range(5)), [0.5, 0.375, 0.25, 0.125, 0], **FLOAT32)


def test_inverse_sqrt_schedule_equals_the_2021_formula():
    schedule = InverseSqrtWarmup(0.32, hidden_size=64, num_warmup_steps=10)
    steps = np.array([0, 1, 9, 10, 11, 1000])
    expected = 0.32 / 8 * np.minimum(1, steps / 10) / np.sqrt(np.maximum(steps, 10))
    np.testing.assert_allclose(rates(schedule, steps), expected, **FLOAT32)


@pytest.mark.parametrize(
    "schedule",
    [LinearWarmupLinearDecay(0.5, 100, 10), InverseSqrtWarmup(0.32, 64, 10)],
    ids=lambda schedule: type(schedule).__name__,
)
def test_schedule_survives_serialization(schedule):
    serialized = keras.optimizers.schedules.serialize(schedule)
    restored = keras.optimizers.schedules.deserialize(serialized)
    assert type(restored) is type(schedule)
    assert restored.get_config() == schedule.get_config()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearWarmupLinearDecay(1.0, 0), "num_train_steps=0: expected at least 1"),
        (lambda: LinearWarmupLinearDecay(1.0, 9, -1), "num_warmup_steps=-1: expected at least 0"),
        (lambda: InverseSqrtWarmup(1.0, 64, 0), "num_warmup_steps=0: expected at least 1"),
        (lambda: InverseSqrtWarmup(1.0, 0, 5), "hidden_size=0: expected at least 1"),
        (lambda: create_optimizer("SGD", 1.0), "optimizer='SGD': expected one of AdamWeightDecay"),
    ],
)
def test_bad_setting_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def adam_weight_decay_oracle(weight, gradients, rate, decay, beta_1=0.9, beta_2=0.999, eps=1e-6):
    """The three lines of the docstring, in float64."""
    m, v = np.zeros_like(weight), np.zeros_like(weight)
    for step, gradient in enumerate(gradients):
        m = beta_1 * m + (1 - beta_1) * gradient
        v = beta_2 * v + (1 - beta_2) * gradient**2
        weight = weight - rate(step) * (m / (np.sqrt(v) + eps) + decay * weight)
    return weight


def apply_step(optimizer, mode):
    """Returns `apply_gradients` as `mode` runs it."""
    if mode == "eager":
        return optimizer.apply_gradients
    return tf.function(optimizer.apply_gradients, jit_compile=mode == "jit_compile")


@pytest.mark.parametrize("mode", ["eager", "tf.function", "jit_compile"])
def test_adam_weight_decay_equals_float64_oracle(mode):
    rng = np.random.default_rng(0)
    names = ["dense/kernel", "dense/bias", "LayerNorm/gamma", "layer_normalization/beta"]
    weights = [rng.normal(size=(3, 4)) for _ in names]
    gradients = rng.normal(size=(8, len(names), 3, 4))
    variables = [
        tf.Variable(weight, name=name, dtype=tf.float32)
        for weight, name in zip(weights, names, strict=True)
    ]
    schedule = LinearWarmupLinearDecay(0.1, num_train_steps=8, num_warmup_steps=2)
    optimizer = AdamWeightDecay(schedule, weight_decay=0.3)
    optimizer.build(variables)
    apply = apply_step(optimizer, mode)
    for step in gradients:
        apply(list(zip([tf.constant(g, tf.float32) for g in step], variables, strict=True)))

    def rate(step):
        return 0.1 * (step / 2 if step < 2 else 1 - step / 8)

    for i, variable in enumerate(variables):
        decay = 0.3 if i == 0 else 0.0
        expected = adam_weight_decay_oracle(weights[i], gradients[:, i], rate, decay)
        np.testing.assert_allclose(variable.numpy(), expected, err_msg=variable.name, **FLOAT32)


@pytest.mark.parametrize("mode", ["eager", "tf.function", "jit_compile"])
def test_sparse_gradient_equals_dense_gradient(mode):
    dense, sparse = (tf.Variable(np.ones((6, 2)), name="table", dtype=tf.float32) for _ in "ab")
    for variable in (dense, sparse):
        optimizer = AdamWeightDecay(0.1, weight_decay=0.3)
        optimizer.build([variable])
        apply = apply_step(optimizer, mode)
        rng = np.random.default_rng(1)
        for _ in range(4):
            # Row 3 is named twice in every gradient, rows 4 and 5 perhaps never.
            rows = np.append(rng.integers(0, 4, size=3), [3, 3])
            values = rng.normal(size=(5, 2)).astype(np.float32)
            gradient = tf.IndexedSlices(tf.constant(values), tf.constant(rows), tf.constant([6, 2]))
            if variable is dense:
                gradient = tf.convert_to_tensor(gradient)
            apply([(gradient, variable)])
    np.testing.assert_allclose(sparse.numpy(), dense.numpy(), **FLOAT32)


@pytest.mark.parametrize(
    ("name", "jit_compile"), [(name, False) for name in OPTIMIZERS] + [("Adafactor", True)]
)
def test_optimizer_lowers_the_loss_of_an_embedding_model(name, jit_compile):
    model = keras.Sequential(
        [
            keras.layers.Embedding(20, 4, embeddings_initializer=keras.initializers.Ones()),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(2, kernel_initializer=keras.initializers.GlorotUniform(seed=0)),
        ]
    )
    ids = tf.constant([[1, 1, 2], [3, 3, 4]])
    labels = tf.constant([0, 1])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(create_optimizer(name, 0.1), loss, jit_compile=jit_compile)
    losses = [model.train_on_batch(ids, labels) for _ in range(6)]
    assert losses[-1] < 0.8 * losses[0]


def minimize_inner_product(optimizer, gradient, variable):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(gradient * variable)
    optimizer.minimize(loss, [variable], tape=tape)


def test_loss_scaling_changes_no_update_and_skips_infinite_gradients():
    plain, scaled = (tf.Variable([1.0, 2.0], name="kernel") for _ in "ab")
    plain_optimizer = AdamWeightDecay(0.1)
    scaled_optimizer = keras.mixed_precision.LossScaleOptimizer(AdamWeightDecay(0.1))
    minimize_inner_product(plain_optimizer, [0.5, -0.25], plain)
    minimize_inner_product(scaled_optimizer, [0.5, -0.25], scaled)
    np.testing.assert_allclose(scaled.numpy(), plain.numpy(), **FLOAT32)

    minimize_inner_product(scaled_optimizer, [np.inf, 0.0], scaled)
    np.testing.assert_allclose(scaled.numpy(), plain.numpy(), **FLOAT32)
    # A skipped update counts as a step: the schedule and the data have moved on.
    assert int(scaled_optimizer.iterations) == 2


def test_adam_weight_decay_survives_its_config():
    schedule = LinearWarmupLinearDecay(0.5, 100, 10)
    optimizer = AdamWeightDecay(
        schedule, 0.2, 0.8, 0.9, 1e-4, exclude_from_weight_decay=["gain"], global_clipnorm=1.0
    )
    restored = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert isinstance(restored, AdamWeightDecay)
    assert restored.get_config() == optimizer.get_config()
    gain, bias = tf.Variable(1.0, name="gain"), tf.Variable(1.0, name="bias")
    zero = tf.constant(0.0)
    restored.iterations.assign(50)
    restored.apply_gradients([(zero, gain), (zero, bias)])
    # With a zero gradient only the decay moves a weight: rate 0.25 times decay 0.2.
    np.testing.assert_allclose([float(gain), float(bias)], [1.0, 0.95], rtol=1e-6)
