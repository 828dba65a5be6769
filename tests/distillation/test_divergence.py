"""Claims about the divergence of rows: values, signs, extremes, and its written-out gradient."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import kl_oracle

from bigbird.distillation.divergence import TAILS, TopKRows, WholeRows
from bigbird.distillation.targets import TeacherLogits, TopKTargets


def rows_of(targets, tail, temperature=1.0, active=None):
    active = tf.ones_like(targets.ids[:, 0], tf.bool) if active is None else tf.constant(active)
    return TopKRows.of(
        targets, active, temperature=temperature, tail=tail, vocab_size=targets.vocab_size
    )


def value_and_gradient(rows, student):
    """Divergences and their written-out gradients `[C, V]` for softened student logits."""
    student = tf.constant(student, tf.float32)
    normalizers = rows.normalizers(student)
    upstream = tf.ones_like(normalizers["log_norm"])
    gradient = rows.gradient(student, normalizers, upstream)
    return rows.divergence(student, normalizers).numpy(), gradient.numpy()


def textbook(rows, student):
    """The dense formula and TensorFlow's gradient of it."""
    student = tf.constant(student, tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(student)
        losses = rows.textbook(student)
    return losses.numpy(), tape.gradient(losses, student).numpy()


def targets_of(kept_probabilities, vocab_size, ids=None):
    """One row that keeps these probabilities of a distribution that sums to 1."""
    kept = np.array([kept_probabilities], np.float32)
    ids = np.arange(kept.shape[1])[np.newaxis] if ids is None else [ids]
    return TopKTargets(ids, np.log(kept), [0.0], vocab_size)


@pytest.mark.parametrize(
    ("kept", "student", "tail", "expected"),
    [
        # Half of the teacher's mass is kept; the student puts 0.9 there.
        ([0.5], [0.9, 0.1], "zero", -0.2939),
        ([0.5], [0.9, 0.1], "renormalize", 0.1054),
        ([0.5], [0.9, 0.1], "bucket", 0.5108),
        # Of a kept 0.6 under a student's 0.9, the truncated term alone is -0.2433.
        ([0.6], [0.9, 0.1], "zero", -0.2433),
        ([0.6], [0.9, 0.1], "bucket", 0.3112),
    ],
)
def test_truncated_divergences_have_their_known_values(kept, student, tail, expected):
    rows = rows_of(targets_of(kept, 2), tail)
    loss, gradient = value_and_gradient(rows, np.log([student]))
    assert loss[0] == pytest.approx(expected, abs=5e-5)
    assert np.abs(gradient).max() > 1e-2  # A negative loss is not clamped, nor its gradient.


def test_renormalising_does_not_hide_a_student_whose_mass_lies_outside():
    rows = rows_of(TopKTargets([[0, 1]], [[0.0, 0.0]], None, 4), "renormalize")
    loss, _ = value_and_gradient(rows, [[0.0, 0.0, 10.0, 10.0]])
    # Over the kept ids alone the student would agree and the loss would be 0.
    assert loss[0] == pytest.approx(10.0, abs=1e-3)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31 - 1),
    vocab_size=st.integers(2, 30),
    temperature=st.sampled_from([0.05, 0.7, 1.0, 2.5]),
    spread=st.sampled_from([0.1, 3.0, 30.0]),
    tail=st.sampled_from(TAILS),
    data=st.data(),
)
def test_gradient_is_that_of_the_textbook_formula(
    seed, vocab_size, temperature, spread, tail, data
):
    rng = np.random.default_rng(seed)
    k = data.draw(st.integers(1, vocab_size))
    count = rng.integers(0, k + 1, size=3)
    teacher = TopKTargets.from_logits(
        tf.constant(spread * rng.normal(size=(3, vocab_size)), tf.float32), k, temperature
    )
    targets = TopKTargets(
        teacher.ids, teacher.logits, teacher.log_z, vocab_size, count, temperature
    )
    rows = rows_of(targets, tail, temperature)
    student = spread * rng.normal(size=(3, vocab_size)) / temperature
    losses, gradient = value_and_gradient(rows, student)
    dense_losses, dense_gradient = textbook(rows, student)
    scale = 1.0 + max(np.abs(student).max(), np.abs(teacher.logits).max() / temperature)
    np.testing.assert_allclose(losses, dense_losses, rtol=1e-5, atol=1e-6 * scale)
    # An exponential makes a relative error of the rounding of its argument, here up to `scale`.
    np.testing.assert_allclose(gradient, dense_gradient, atol=2e-6 + 2**-23 * scale)
    np.testing.assert_array_equal(losses[count == 0], 0.0)
    np.testing.assert_array_equal(gradient[count == 0], 0.0)
    if tail != "zero":
        assert (losses >= -1e-6 * scale).all()


@pytest.mark.parametrize("tail", TAILS)
def test_extreme_rows_agree_with_float64_and_stay_finite(tail):
    temperature = 0.05
    student = np.array(
        [
            [40.0, 0, 0, 0, 0, 0],
            [1e10, 0, 0, 0, 0, 0],
            [-1e10, 0, 0, 0, 0, 0],
            [-5.5, -5.5, 0, 0, 0, 0],  # 110 below at T = 0.05.
            [0, 0, 0, 0, 0, -5.5],
        ]
    )
    teacher = np.array([[0.10, 0.09, 0.08, 0.07, 0.06, 0.05]] * 5)
    teacher[3, 1] = -5.5
    targets = TopKTargets.from_logits(tf.constant(teacher, tf.float32), 3, temperature)
    rows = rows_of(targets, tail, temperature)
    losses, gradient = value_and_gradient(rows, student / temperature)
    for row, z in enumerate(student):
        arguments = (
            targets.ids[row].numpy(),
            targets.logits[row].numpy(),
            kl_oracle.logsumexp(teacher[row] / temperature),
            temperature,
            tail,
        )
        expected = kl_oracle.divergence(z, *arguments) / temperature**2
        np.testing.assert_allclose(losses[row], expected, rtol=1e-5, atol=1e-5)
        expected = kl_oracle.logit_gradient(z, *arguments) / temperature
        np.testing.assert_allclose(gradient[row], expected, atol=1e-5)


@pytest.mark.parametrize("tail", TAILS)
def test_a_kept_mass_of_exactly_one_has_no_tail_term(tail):
    # With everything in one kept id, all rules are the same cross entropy.
    targets = TopKTargets([[0, 1]], [[0.0, -np.inf]], [0.0], 4)
    losses, gradient = value_and_gradient(rows_of(targets, tail), [[40.0, 0.0, 0.0, 0.0]])
    assert losses[0] == 0.0
    np.testing.assert_allclose(gradient, np.zeros((1, 4)), atol=1e-7)
    losses, gradient = value_and_gradient(rows_of(targets, tail), [[0.0, 40.0, 0.0, 0.0]])
    assert losses[0] == pytest.approx(40.0)
    np.testing.assert_allclose(gradient, [[-1.0, 1.0, 0.0, 0.0]], atol=1e-6)


@pytest.mark.parametrize("tail", TAILS)
def test_a_student_equal_to_its_whole_teacher_has_loss_zero(tail):
    logits = tf.random.stateless_normal([5, 9], seed=[1, 2]) * 4
    losses, gradient = value_and_gradient(rows_of(TopKTargets.from_logits(logits, 9), tail), logits)
    np.testing.assert_allclose(losses, np.zeros(5), atol=1e-6)
    np.testing.assert_allclose(gradient, np.zeros((5, 9)), atol=1e-6)


def test_a_one_hot_teacher_and_a_uniform_student_differ_by_log_of_the_vocabulary():
    targets = TopKTargets([[7]], [[3.0]], [3.0], 200_000)
    losses, _ = value_and_gradient(rows_of(targets, "renormalize"), np.zeros((1, 200_000)))
    assert losses[0] == pytest.approx(np.log(200_000), rel=1e-6)  # 12.206, not 12.128.


@pytest.mark.parametrize("tail", ["renormalize", "zero"])
def test_an_id_named_twice_counts_with_the_sum_of_its_masses(tail):
    student = [[0.3, -0.2, 0.1, 0.0]]
    twice = TopKTargets([[2, 1, 2]], np.log([[0.4, 0.3, 0.2]]).astype(np.float32), [0.0], 4)
    once = targets_of([0.6, 0.3], 4, ids=[2, 1])
    found, expected = (value_and_gradient(rows_of(t, tail), student) for t in (twice, once))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], atol=1e-6)


@pytest.mark.parametrize("tail", TAILS)
def test_entries_behind_count_are_never_read(tail):
    whole = TopKTargets([[2, 1, 3, -9, 10**6]], [[3.0, 2.0, 1.0, np.nan, 9.0]], [4.0], 6, [3])
    short = TopKTargets([[2, 1, 3]], [[3.0, 2.0, 1.0]], [4.0], 6)
    student = [[0.3, -0.2, 0.1, 0.0, 1.0, 2.0]]
    found, expected = (value_and_gradient(rows_of(t, tail), student) for t in (whole, short))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], atol=1e-7)


def test_a_bfloat16_teacher_gives_what_its_float32_copy_gives():
    rounded = TopKTargets.from_logits(tf.random.stateless_normal([4, 9], seed=[3, 4]), 5).cast(
        "bfloat16"
    )
    widened = TopKTargets(rounded.ids, tf.cast(rounded.logits, tf.float32), rounded.log_z, 9)
    student = np.linspace(-2, 2, 36).reshape(4, 9)
    for found, expected in zip(
        value_and_gradient(rows_of(rounded, "bucket"), student),
        value_and_gradient(rows_of(widened, "bucket"), student),
        strict=True,
    ):
        np.testing.assert_array_equal(found, expected)


def test_a_whole_teacher_equals_targets_that_keep_every_id():
    logits = tf.random.stateless_normal([3, 8], seed=[5, 6]) * 3
    student = np.linspace(-2, 2, 24).reshape(3, 8)
    whole = WholeRows.of(
        TeacherLogits(logits), tf.ones(3, tf.bool), temperature=2.0, tail=None, vocab_size=8
    )
    kept = rows_of(TopKTargets.from_logits(logits, 8, 2.0), "zero", 2.0)
    for found, expected in zip(
        value_and_gradient(whole, student), value_and_gradient(kept, student), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(textbook(whole, student)[0], textbook(kept, student)[0], atol=1e-6)


def test_diagnostics_are_the_masses_they_are_named_after():
    targets = targets_of([0.5, 0.3], 4)
    student = np.log([[0.1, 0.6, 0.2, 0.1]])
    rows = rows_of(targets, "renormalize")
    student = tf.constant(student, tf.float32)
    found = rows.diagnostics(student, rows.normalizers(student))
    expected = {
        "kept_mass": 0.8,
        "student_kept_mass": 0.7,
        "tail_kl": 0.2 * np.log(0.2 / 0.3),
        "argmax_agreement": 0.0,
    }
    assert {name: float(rows[0]) for name, rows in found.items()} == pytest.approx(expected, 1e-5)


def test_the_oracles_gradient_is_that_of_its_loss():
    rng = np.random.default_rng(0)
    teacher = 2 * rng.normal(size=8)
    kept = np.argsort(-teacher)[:3]
    for tail in TAILS:
        row = (kept, teacher[kept], kl_oracle.logsumexp(teacher / 2.5), 2.5, tail)
        point = rng.normal(size=8)
        numeric = kl_oracle.central_differences(lambda z, r=row: kl_oracle.divergence(z, *r), point)
        np.testing.assert_allclose(kl_oracle.logit_gradient(point, *row), numeric, atol=1e-8)
