"""Claims about `TopKTargets`: what they know of the teacher, and what they refuse."""

import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from bigbird.distillation.targets import TeacherLogits, TopKTargets


def targets_of(probabilities, k, temperature=1.0):
    return TopKTargets.from_logits(tf.math.log(tf.constant(probabilities)), k, temperature)


def missing_mass(targets):
    return -math.expm1(targets.log_mass()[0])


def faults_of(targets, **options):
    """The first words of the faults that any row has."""
    return [
        explanation
        for explanation, rows in targets.faults(**options).items()
        if tf.reduce_any(rows)
    ]


def test_from_logits_keeps_the_largest_in_descending_order():
    targets = TopKTargets.from_logits([[1.0, 4.0, 2.0, 3.0]], k=3)
    np.testing.assert_array_equal(targets.ids, [[1, 3, 2]])
    np.testing.assert_array_equal(targets.logits, [[4.0, 3.0, 2.0]])
    assert targets.vocab_size == 4
    assert not faults_of(targets, unique_ids=True)


def test_temperature_spreads_every_missing_id_and_not_the_tail_as_one_atom():
    targets = targets_of([0.5, 0.3] + [0.2 / 1000] * 1000, k=2, temperature=2.0)
    # One atom of mass 0.2 would give sqrt(.2) / (sqrt(.5) + sqrt(.3) + sqrt(.2)) = 0.263.
    assert 1.0 - math.exp(targets.log_mass()) == pytest.approx(0.919, abs=5e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounded_logits_keep_the_missing_mass_within_one_percent(dtype):
    head, tail = np.array([24.3, 21.7, 19.1]), np.full(1000, 9.91)
    targets = TopKTargets.from_logits([np.concatenate([head, tail]).astype(np.float32)], k=3)
    missing = np.exp(tail).sum() / (np.exp(head).sum() + np.exp(tail).sum())
    assert missing_mass(targets) == pytest.approx(missing, rel=0.01)
    assert missing_mass(targets.cast(dtype)) == pytest.approx(missing, rel=0.01)
    # The same logits under the old normaliser would not do.
    rounded = TopKTargets(targets.ids, tf.cast(targets.logits, dtype), targets.log_z, 1003)
    assert missing_mass(rounded) != pytest.approx(missing, rel=0.1)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**31 - 1),
    vocab_size=st.integers(1, 40),
    temperature=st.floats(0.1, 10.0),
    data=st.data(),
)
def test_kept_mass_is_that_of_the_whole_softmax(seed, vocab_size, temperature, data):
    k = data.draw(st.integers(1, vocab_size))
    logits = 4.0 * np.random.default_rng(seed).normal(size=(3, vocab_size))
    targets = TopKTargets.from_logits(tf.constant(logits, tf.float32), k, temperature)
    softened = np.exp(logits / temperature - np.max(logits / temperature, -1, keepdims=True))
    expected = np.sort(softened, -1)[:, -k:].sum(-1) / softened.sum(-1)
    # Logits of 20 / 0.1 have an ulp of 1.5e-5.
    np.testing.assert_allclose(np.exp(targets.log_mass()), expected, rtol=1e-4)
    assert not faults_of(targets, unique_ids=True)


def test_ids_above_65535_and_131071_come_back():
    ids = [[65535, 65536, 131072, 201087]]
    targets = TopKTargets(ids, [[4.0, 3.0, 2.0, 1.0]], [5.0], 201088)
    np.testing.assert_array_equal(targets.ids, ids)
    assert not faults_of(targets)


def test_what_lies_behind_count_or_is_minus_infinity_is_absent_and_no_fault():
    logits = [[3.0, 2.0, 1.0, np.nan, 7.0], [3.0, 2.0, 1.0, -np.inf, -np.inf]]
    ids = [[5, 1, 2, -77, 10**6], [5, 1, 2, -1, -1]]
    targets = TopKTargets(ids, logits, [4.0, 4.0], 6, count=[3, 5])
    np.testing.assert_array_equal(targets.present, [[True] * 3 + [False] * 2] * 2)
    np.testing.assert_allclose(targets.log_mass(), np.log(np.exp([3, 2, 1]).sum()) - 4.0, rtol=1e-6)
    assert not faults_of(targets, unique_ids=True)


def test_a_smaller_vocabulary_drops_ids_and_counts_their_mass_as_missing():
    targets = targets_of([[0.2, 0.1, 0.05, 0.05, 0.4, 0.2]], k=4)
    np.testing.assert_allclose(targets.dropped_mass(4), [0.6], rtol=1e-6)
    fewer = targets.restrict(4)
    assert fewer.vocab_size == 4
    np.testing.assert_array_equal(fewer.ids[0, :2], [0, 1])
    np.testing.assert_array_equal(fewer.count, [2])
    np.testing.assert_allclose(np.exp(fewer.log_mass()), [0.3], rtol=1e-6)
    assert not faults_of(fewer, unique_ids=True)


def test_a_larger_vocabulary_changes_nothing():
    targets = targets_of([[0.5, 0.5]], k=2)
    assert targets.restrict(3) is targets
    np.testing.assert_array_equal(targets.dropped_mass(3), [0.0])


def test_dropped_mass_without_a_normaliser_is_a_share_of_the_kept_mass():
    targets = TopKTargets([[5, 0]], [[math.log(3.0), 0.0]], None, 6)
    np.testing.assert_allclose(targets.dropped_mass(4), [0.75], rtol=1e-6)


def test_whole_teacher_logits_drop_the_mass_of_columns_the_student_lacks():
    teacher = TeacherLogits(tf.math.log([[0.2, 0.3, 0.5]]))
    np.testing.assert_allclose(teacher.dropped_mass(2), [0.5], rtol=1e-6)
    assert teacher.restrict(2).vocab_size == 2


@pytest.mark.parametrize(
    ("changes", "explanation"),
    [
        ({"ids": [[6, 1]]}, "ids outside the vocabulary: expected 0 <= id < 6"),
        ({"ids": [[-1, 1]]}, "ids outside the vocabulary"),
        ({"logits": [[np.nan, 1.0]]}, "NaN or +inf"),
        ({"logits": [[np.inf, 1.0]]}, "NaN or +inf"),
        ({"logits": [[1.0, 2.0]]}, "out of order"),
        ({"logits": [[-np.inf, 2.0]]}, "out of order"),
        ({"log_z": [np.nan]}, "log_z that is NaN"),
        ({"log_z": [1.0]}, "a kept mass above 1"),
        ({"count": [3]}, "count outside 0 ... 2"),
        ({"ids": [[1, 1]]}, "named twice"),
    ],
)
def test_a_faulty_row_is_named_with_what_was_expected(changes, explanation):
    values = {"ids": [[0, 1]], "logits": [[2.0, 1.0]], "log_z": [3.0], "vocab_size": 6}
    assert not faults_of(TopKTargets(**values), unique_ids=True)
    found = faults_of(TopKTargets(**values | changes), unique_ids=True)
    assert explanation in found[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": [[2.0]]}, r"logits must have the shape \(1, 2\).*received \(1, 1\)"),
        ({"log_z": [3.0, 3.0]}, r"log_z must have the shape \(1,\).*received \(2,\)"),
        ({"count": [[2]]}, r"count must have the shape \(1,\).*received \(1, 1\)"),
        ({"logits": [[2, 1]]}, "logits must be floating point; received int32"),
        ({"vocab_size": 0}, "vocab_size must be at least 1; received 0"),
        ({"temperature": 0.0}, "temperature must be a finite number above 0; received 0.0"),
        ({"temperature": math.nan}, "temperature must be a finite number above 0"),
    ],
)
def test_what_shapes_alone_can_tell_is_refused_at_once(changes, message):
    values = {"ids": [[0, 1]], "logits": [[2.0, 1.0]], "log_z": [3.0], "vocab_size": 6}
    with pytest.raises(ValueError, match=message):
        TopKTargets(**values | changes)


def test_more_logits_than_the_vocabulary_has_are_refused():
    with pytest.raises(ValueError, match="k must be between 1 and the vocabulary size 3; got 4"):
        TopKTargets.from_logits([[1.0, 2.0, 3.0]], k=4)


def test_the_mass_of_targets_without_a_normaliser_is_refused():
    with pytest.raises(ValueError, match="log_z=None"):
        TopKTargets([[0]], [[1.0]], None, 2).log_mass()


def test_targets_pass_through_datasets_and_functions():
    logits = tf.constant(np.random.default_rng(0).normal(size=(4, 3, 8)), tf.float32)
    dataset = tf.data.Dataset.from_tensor_slices(TopKTargets.from_logits(logits, k=2)).batch(4)
    targets = next(iter(dataset))
    mass = tf.function(lambda batch: batch.log_mass(), jit_compile=True)(targets)
    np.testing.assert_allclose(mass, TopKTargets.from_logits(logits, k=2).log_mass(), rtol=1e-5)
