"""Claims about capturing a teacher: what it thinks, of every sequence once, in the same bytes."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from bigbird.distillation.cache import CacheError, TeacherCache, TeacherCacheWriter, finalize_cache
from bigbird.distillation.cache_format import RecordFormat
from bigbird.distillation.capture import (
    audit,
    capture,
    plan_capture,
    shards_to_capture,
    tokens_to_capture,
)
from bigbird.distillation.sequences import next_token_sequences, packed_sequences
from bigbird.distillation.students import functional_model
from bigbird.distillation.targets import TopKTargets
from bigbird.distillation.topk_teacher import TopKTeacher

VOCAB_SIZE, KEPT, SHARD_SEQUENCES = 40, 5, 3
LAYOUT = RecordFormat(VOCAB_SIZE, KEPT, temperatures=(1.0, 2.0))
# Two sequences are alike, and of one no token takes part.
LENGTHS = [5, 9, 40, 5, 12, 3, 7, 33, 4, 6]


def sequence(number):
    rng = np.random.default_rng(0 if number == 3 else number)
    ids = rng.integers(1, VOCAB_SIZE, size=LENGTHS[number]).astype(np.int32)
    return {"input_ids": ids, "mask": (ids % 3 > 0) & (number != 5)}


def data():
    signature = {"input_ids": tf.TensorSpec([None], tf.int32), "mask": tf.TensorSpec([None], bool)}
    return tf.data.Dataset.from_generator(
        lambda: map(sequence, range(len(LENGTHS))), output_signature=signature
    )


@pytest.fixture(scope="module")
def whole_model():
    tf_keras.utils.set_random_seed(1)
    ids = tf_keras.Input([None], dtype="int32")
    hidden = tf_keras.layers.Embedding(VOCAB_SIZE, 8)(ids)
    hidden = tf_keras.layers.LSTM(8, return_sequences=True)(hidden)
    return tf_keras.Model(ids, tf_keras.layers.Dense(VOCAB_SIZE)(hidden))


@pytest.fixture(scope="module")
def teacher(whole_model):
    return new_teacher(whole_model)


def new_teacher(model, layout=LAYOUT, **options):
    settings = {"batch_size": 2, "max_length": 40, "chunk_tokens": 4}
    return TopKTeacher(functional_model(model), layout, **{**settings, **options})


@pytest.fixture(scope="module")
def plan():
    return plan_capture(data())


def open_writer(directory, **changes):
    return TeacherCacheWriter(
        directory,
        **LAYOUT.to_json(),
        shard_sequences=SHARD_SEQUENCES,
        expected_sequences=8,
        **changes,
    )


def files_of(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, teacher, plan):
    directory = tmp_path_factory.mktemp("capture")
    with open_writer(directory) as writer:
        capture(teacher, data(), plan, writer)
    return directory


def test_the_plan_has_each_sequence_with_something_to_say_once(plan):
    assert plan.positions.tolist() == [0, 1, 2, 4, 6, 7, 8, 9]
    assert (plan.repeated, plan.empty, plan.max_length) == (1, 1, 40)
    assert plan.tokens.tolist() == [int(sequence(n)["mask"].sum()) for n in plan.positions]


def test_the_cache_holds_the_top_k_of_the_whole_logits(whole, whole_model, plan):
    cache = TeacherCache(whole)
    assert len(cache) == 8
    for key, number in zip(cache.keys, plan.positions, strict=True):
        ids, mask = sequence(number)["input_ids"], sequence(number)["mask"]
        record = cache[key]
        np.testing.assert_array_equal(record["input_ids"], ids)
        np.testing.assert_array_equal(record["mask"], mask)
        logits = whole_model(ids[np.newaxis])[0][mask]
        for place, temperature in enumerate(LAYOUT.temperatures):
            expected = TopKTargets.from_logits(logits, KEPT, temperature)
            np.testing.assert_array_equal(record["ids"][mask], expected.ids)
            stored = TopKTargets(
                record["ids"][mask],
                record["logits"][mask],
                record["log_z"][mask][:, place],
                VOCAB_SIZE,
                temperature=temperature,
            )
            np.testing.assert_allclose(stored.log_mass(), expected.log_mass(), atol=1e-5)


@pytest.mark.parametrize("options", [{"chunk_tokens": 7}, {"chunk_tokens": 1000}])
def test_what_the_teacher_says_does_not_depend_on_the_chunk(options, whole_model, teacher, plan):
    sequences = [sequence(number) for number in plan.positions]
    others = new_teacher(whole_model, **options).records(sequences)
    for record, other in zip(teacher.records(sequences), others, strict=True):
        for one, two in zip(record.targets, other.targets, strict=True):
            np.testing.assert_array_equal(one.ids, two.ids)
            np.testing.assert_allclose(one.logits, two.logits, atol=1e-6)
            np.testing.assert_allclose(one.log_z, two.log_z, atol=1e-6)


def test_a_chunk_is_padded_no_further_than_needed(whole_model):
    teacher = new_teacher(whole_model, chunk_tokens=100)
    chunks = []
    top = teacher._top
    teacher._top = lambda chunk: chunks.append(len(chunk)) or top(chunk)
    for tokens in (5, 33, 105):
        ids, *_ = teacher._top_of_rows(tf.ones([tokens, 8]))
        assert len(ids) == tokens
    assert chunks == [32, 64, 100, 32]


def test_a_capture_that_is_stopped_goes_on_and_ends_with_the_same_bytes(
    whole, tmp_path, teacher, plan
):
    for stop_after in (2, 4):
        records = []

        def stop(record, records=records, stop_after=stop_after):
            records.append(record)
            if len(records) == stop_after:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), open_writer(tmp_path) as writer:
            capture(teacher, data(), plan, writer, stop)
    with open_writer(tmp_path) as writer:
        assert shards_to_capture(plan, writer) == [1, 2]
        assert tokens_to_capture(plan, writer) == plan.tokens[3:].sum()
        capture(teacher, data(), plan, writer)
    assert files_of(tmp_path) == files_of(whole)


def test_workers_capture_disjoint_shards_that_are_those_of_one(whole, tmp_path, teacher, plan):
    for worker in (1, 0):
        with open_writer(tmp_path, num_shards=2, shard_index=worker) as writer:
            capture(teacher, data(), plan, writer)
    finalize_cache(tmp_path)
    assert files_of(tmp_path) == files_of(whole)


def test_hidden_states_are_stored_where_they_are_wanted(tmp_path, whole_model, plan):
    layout = RecordFormat(VOCAB_SIZE, KEPT, fields=("states",), state_width=8)
    teacher = new_teacher(whole_model, layout)
    with TeacherCacheWriter(tmp_path, **layout.to_json(), shard_sequences=8) as writer:
        capture(teacher, data(), plan, writer)
    model = functional_model(whole_model)
    cache = TeacherCache(tmp_path)
    mask = sequence(1)["mask"]
    hidden = model.hidden_states({"input_ids": sequence(1)["input_ids"][np.newaxis]}, False)[0]
    stored = tf.cast(cache[cache.keys[1]]["states"], tf.float32)
    np.testing.assert_allclose(stored[mask], hidden[mask], rtol=2**-8, atol=1e-6)


class WithinDocuments(tf_keras.layers.Layer):
    """Attends to earlier tokens of the same document."""

    def call(self, inputs):
        hidden, document_ids = inputs
        place = tf.range(tf.shape(hidden)[1])
        same = document_ids[:, :, tf.newaxis] == document_ids[:, tf.newaxis, :]
        scores = tf.where(
            same & (place[:, tf.newaxis] >= place), hidden @ tf.transpose(hidden, [0, 2, 1]), -1e9
        )
        return tf.nn.softmax(scores) @ hidden


def test_a_packed_document_does_not_see_the_one_before_it(tmp_path):
    tf_keras.utils.set_random_seed(2)
    ids, documents = (tf_keras.Input([None], dtype="int32") for _ in range(2))
    hidden = WithinDocuments()([tf_keras.layers.Embedding(VOCAB_SIZE, 8)(ids), documents])
    model = tf_keras.Model([ids, documents], tf_keras.layers.Dense(VOCAB_SIZE)(hidden))
    student = functional_model(model, input_names=("input_ids", "document_ids"))
    layout = RecordFormat(VOCAB_SIZE, KEPT, fields=("document_ids",), compact=True)
    records = {}
    for name, first in (("one", [3, 4, 5]), ("other", [9, 8, 7])):
        texts = tf.ragged.constant([first, [6, 2, 6, 1]], dtype=tf.int32)
        singles = next_token_sequences(tf.data.Dataset.from_tensor_slices(texts))
        data = packed_sequences(singles, 16)
        teacher = TopKTeacher(student, layout, batch_size=1, max_length=16)
        with TeacherCacheWriter(tmp_path / name, **layout.to_json()) as writer:
            capture(teacher, data, plan_capture(data), writer)
        cache = TeacherCache(tmp_path / name)
        (records[name],) = (cache[key] for key in cache.keys)
    one, other = records["one"], records["other"]
    np.testing.assert_array_equal(one["document_ids"], [1, 1, 1, 2, 2, 2, 2])
    np.testing.assert_array_equal(one["mask"], [1, 1, 0, 1, 1, 1, 0])
    for field in ("ids", "logits", "log_z"):
        np.testing.assert_array_equal(one[field][3:], other[field][3:])
        assert not np.array_equal(one[field][:2], other[field][:2])


def test_the_audit_finds_rounding_in_a_true_cache_and_more_under_another_teacher(
    whole, whole_model, teacher, plan
):
    report = audit(teacher, data(), plan, TeacherCache(whole), count=4)
    assert report.sequences == 4
    assert report.cache["other ids, share"] == 0
    # A distance of at most 1 nat is rounded to 2^-9 of it.
    assert 0 < report.cache["logits, largest"] < 2**-8
    assert report.again["logits, largest"] == 0
    assert "teacher again" in str(report)
    other = tf_keras.models.clone_model(whole_model)
    report = audit(new_teacher(other), data(), plan, TeacherCache(whole), count=4)
    assert report.cache["other ids, share"] > 0.5


def test_the_audit_of_other_data_is_refused(whole, teacher):
    others = data().map(lambda s: {**s, "input_ids": s["input_ids"] // 2})
    with pytest.raises(CacheError, match="does not hold the sequence"):
        audit(teacher, others, plan_capture(others), TeacherCache(whole), count=1)


def test_a_teacher_of_another_vocabulary_is_refused(whole_model):
    with pytest.raises(ValueError, match="head has 40 words.*vocab_size=50"):
        new_teacher(whole_model, RecordFormat(50, KEPT))


def test_data_without_anything_to_capture_are_refused():
    with pytest.raises(ValueError, match="no sequence with a token"):
        plan_capture(data().skip(5).take(1))
