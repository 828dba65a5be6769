"""Claims about the bytes of a teacher record: they are few, and come back as they were."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from bigbird.distillation.cache_format import (
    RecordFormat,
    TeacherRecord,
    pack_bits,
    sequence_key,
    unpack_bits,
)
from bigbird.distillation.targets import TopKTargets

KEPT_200K = dict(vocab_size=200_000, k=100)


def random_record(layout, length=9, seed=0, **changes):
    """A record that fits the format, with every optional field of it."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(length, layout.k)).astype(np.float32) * 3
    logits = -np.sort(-logits, axis=-1)
    ids = np.stack([rng.choice(layout.vocab_size, layout.k, False) for _ in range(length)])
    targets = [
        TopKTargets(
            ids, logits, np.log(np.exp(logits / t).sum(-1)) + 0.1, layout.vocab_size, None, t
        )
        for t in layout.temperatures
    ] or TopKTargets(ids, logits, None, layout.vocab_size)
    tokens = rng.integers(0, layout.vocab_size, size=length)
    optional = {
        "target_ids": tokens[::-1],
        "document_ids": np.arange(length) // 4,
        "labels": tokens - 1,
        "states": rng.normal(size=(length, layout.state_width or 1)).astype(np.float32),
    }
    optional = {name: optional[name] for name in layout.fields}
    record = TeacherRecord(sequence_key(tokens), tokens, targets, **optional)
    return dataclasses.replace(record, **changes)


@pytest.mark.parametrize(("compact", "most"), [(False, 620), (True, 450)])
def test_a_token_of_a_large_vocabulary_takes_few_bytes(compact, most):
    layout = RecordFormat(**KEPT_200K, compact=compact)
    length = 256
    record = layout.encode(random_record(layout, length))
    # TFRecord adds 16 bytes a record.
    assert (len(record) + 16) / length <= most


@pytest.mark.parametrize("compact", [False, True])
def test_a_record_comes_back(compact):
    layout = RecordFormat(
        vocab_size=201_088,
        k=5,
        temperatures=(1.0, 2.5),
        compact=compact,
        fields=("target_ids", "document_ids", "labels", "states"),
        state_width=3,
    )
    record = random_record(layout)
    read = layout.decode(layout.encode(record))
    assert read["key"] == record.key.encode()
    for name in ("input_ids", "target_ids", "document_ids", "labels"):
        np.testing.assert_array_equal(read[name], getattr(record, name))
    np.testing.assert_array_equal(read["ids"], record.targets[0].ids)
    np.testing.assert_array_equal(read["count"], np.full(9, 5))
    assert read["mask"].numpy().all()
    # bfloat16 has 8 bits of precision.
    np.testing.assert_allclose(tf.cast(read["states"], tf.float32), record.states, rtol=2**-8)
    for place, temperature in enumerate(layout.temperatures):
        logits = tf.cast(read["logits"], tf.float32)
        stored = TopKTargets(
            read["ids"], logits, read["log_z"][:, place], 201_088, None, temperature
        )
        expected = record.targets[place]
        np.testing.assert_allclose(stored.log_mass(), expected.log_mass(), atol=2e-6)
        np.testing.assert_allclose(
            stored.logits - stored.logits[:, :1],
            expected.logits - expected.logits[:, :1],
            rtol=2**-8,
        )


@pytest.mark.parametrize("compact", [False, True])
def test_ids_above_65535_and_131071_come_back(compact):
    layout = RecordFormat(vocab_size=201_088, k=4, compact=compact)
    ids = [[65535, 65536, 131072, 201087]]
    targets = TopKTargets(ids, [[4.0, 3.0, 2.0, 1.0]], [5.0], 201_088)
    read = layout.decode(layout.encode(TeacherRecord("key", [201_087], targets)))
    np.testing.assert_array_equal(read["ids"], ids)
    np.testing.assert_array_equal(read["input_ids"], [201_087])


def test_absent_entries_are_counted_out_and_the_same_bytes_whatever_they_held():
    layout = RecordFormat(vocab_size=50, k=5)
    logits = np.array([[3.0, 2.0, 1.0, -np.inf, -np.inf]], np.float32)
    by_infinity = TopKTargets([[7, 8, 9, 49, 49]], logits, [4.0], 50)
    garbage = np.array([[3.0, 2.0, 1.0, np.nan, 9.0]], np.float32)
    by_count = TopKTargets([[7, 8, 9, -1, 2**30]], garbage, [4.0], 50, count=[3])
    few = TopKTargets([[7, 8, 9]], logits[:, :3], [4.0], 50)
    records = [layout.encode(TeacherRecord("key", [1], t)) for t in (by_infinity, by_count, few)]
    assert records[0] == records[1] == records[2]
    read = layout.decode(records[0])
    np.testing.assert_array_equal(read["count"], [3])
    np.testing.assert_array_equal(read["ids"], [[7, 8, 9, 0, 0]])
    assert np.isfinite(tf.cast(read["logits"], tf.float32)).all()


def test_only_the_rows_under_the_mask_are_stored():
    layout = RecordFormat(**KEPT_200K, fields=("labels",))
    record = random_record(layout, 64)
    mask = np.arange(64) % 8 == 3
    masked = layout.encode(dataclasses.replace(record, mask=mask))
    assert len(masked) < len(layout.encode(record)) / 6
    read, whole = layout.decode(masked), layout.decode(layout.encode(record))
    np.testing.assert_array_equal(read["mask"], mask)
    for name, absent in (("ids", 0), ("count", 0), ("labels", -1)):
        np.testing.assert_array_equal(read[name][mask], whole[name][mask])
        np.testing.assert_array_equal(read[name][~mask], np.full_like(read[name][~mask], absent))


def test_a_row_outside_the_mask_may_hold_anything():
    layout = RecordFormat(vocab_size=9, k=2)
    targets = TopKTargets([[1, 2], [99, -5]], [[2.0, 1.0], [np.nan, np.inf]], [3.0, np.nan], 9)
    read = layout.decode(layout.encode(TeacherRecord("key", [1, 2], targets, mask=[True, False])))
    np.testing.assert_array_equal(read["ids"], [[1, 2], [0, 0]])


def test_a_cache_without_normalisers_stores_none():
    layout = RecordFormat(vocab_size=9, k=2, temperatures=())
    read = layout.decode(layout.encode(random_record(layout)))
    assert read["log_z"].shape == [9, 0]


def test_rounding_is_finest_where_the_mass_is():
    logits = np.array([[27.03, 26.95, 20.2]], np.float32)
    targets = TopKTargets([[0, 1, 2]], logits, [28.0], 3)
    layout = RecordFormat(vocab_size=3, k=3)
    read = layout.decode(layout.encode(TeacherRecord("key", [0], targets)))
    distance = float(read["logits"][0, 1])
    assert distance == pytest.approx(-0.08, abs=2e-4)
    # Rounded where they are, both are 27.
    assert float(targets.cast("bfloat16").logits[0, 1]) == 27.0


@settings(max_examples=50)
@given(bits=st.integers(1, 32), data=st.data())
def test_packed_bits_come_back(bits, data):
    largest = 2 ** min(bits, 31) - 1
    values = data.draw(st.lists(st.integers(0, largest), max_size=40))
    packed = pack_bits(np.array(values, np.int64), bits)
    if bits not in (8, 32):
        assert len(packed) == -(-len(values) // 8) * bits
    np.testing.assert_array_equal(unpack_bits(tf.constant(packed), bits, len(values)), values)


def test_the_key_depends_on_the_content_alone():
    assert sequence_key([1, 2, 3]) == sequence_key(np.array([1, 2, 3], np.int64))
    # Fixed: a key is stored, and must be the same in every process and version.
    assert sequence_key([1, 2, 3]) == "e767de29212f643d2dd67c627d59d8da"
    assert (
        len({sequence_key(*ids) for ids in (([1, 2],), ([1], [2]), ([], [1, 2]), ([2, 1],))}) == 4
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"input_ids": [1, 2]}, "expected targets of 2 tokens"),
        ({"input_ids": [50] * 9}, "expected input_ids from 0 to 49"),
        ({"mask": [True]}, "expected mask of shape (9,)"),
        ({"labels": [1] * 9}, "this record has labels set"),
        ({"targets": TopKTargets([[1]] * 9, [[1.0]] * 9, None, 50)}, "received ()"),
        ({"targets": TopKTargets([[1]] * 9, [[1.0]] * 9, [2.0] * 9, 60)}, "received 60"),
        ({"targets": TopKTargets([[50]] * 9, [[1.0]] * 9, [2.0] * 9, 50)}, "outside the vocab"),
        ({"targets": TopKTargets([[5]] * 9, [[3.0]] * 9, [2.0] * 9, 50)}, "a kept mass above 1"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes, told):
    layout = RecordFormat(vocab_size=50, k=4)
    with pytest.raises(ValueError) as error:
        layout.encode(random_record(layout, **changes))
    assert told in str(error.value) and "Sequence " in str(error.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"k": 51}, "k must be between 1 and the vocabulary size 50"),
        ({"temperatures": (1.0, -1.0)}, "temperature must be"),
        ({"temperatures": (1.0, 1.0)}, "temperatures must differ"),
        ({"logits_dtype": "int8"}, "logits_dtype must be one of"),
        ({"fields": ("colours",)}, "field must be one of"),
        ({"fields": ("states",)}, "state_width"),
    ],
)
def test_a_format_that_cannot_be_is_refused(changes, told):
    with pytest.raises(ValueError, match=told):
        RecordFormat(**{"vocab_size": 50, "k": 4, **changes})
