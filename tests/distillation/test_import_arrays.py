"""Claims about importing top-K log-probabilities: whatever their order, the rows are the same."""

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from bigbird.distillation.import_arrays import has_normaliser, read_arrays, record_of

VOCAB_SIZE, LENGTH, KEPT = 30, 6, 4
RNG = np.random.default_rng(0)
LOGITS = 2 * RNG.normal(size=(LENGTH, VOCAB_SIZE))
LOGPROBS = LOGITS - np.log(np.exp(LOGITS).sum(-1, keepdims=True))
INPUT_IDS = RNG.integers(0, VOCAB_SIZE, size=LENGTH)


def top(k, rows=LOGPROBS):
    """Ids and values of the k largest of each row, descending."""
    ids = np.argsort(-rows, axis=-1)[:, :k]
    return ids, np.take_along_axis(rows, ids, -1)


def arrays(ids, logprobs, **others):
    return {"input_ids": INPUT_IDS, "ids": ids, "logprobs": logprobs, **others}


def assert_same(record, other):
    np.testing.assert_array_equal(record.mask, other.mask)
    rows = record.mask
    for name in ("ids", "logits", "log_z", "count"):
        found, expected = getattr(record.targets, name), getattr(other.targets, name)
        np.testing.assert_array_equal(np.asarray(found)[rows], np.asarray(expected)[rows])


@pytest.fixture
def expected():
    return record_of(arrays(*top(KEPT)), VOCAB_SIZE, KEPT)


def test_sorted_log_probabilities_come_through(expected):
    ids, logprobs = top(KEPT)
    np.testing.assert_array_equal(expected.targets.ids, ids)
    np.testing.assert_allclose(expected.targets.logits, logprobs, rtol=1e-6)
    np.testing.assert_allclose(
        expected.targets.log_mass(), np.log(np.exp(logprobs).sum(-1)), rtol=1e-5
    )
    np.testing.assert_array_equal(expected.mask, [True] * (LENGTH - 1) + [False])


def test_the_order_of_the_entries_does_not_matter(expected):
    ids, logprobs = top(KEPT)
    order = np.argsort(RNG.random(ids.shape), axis=-1)
    shuffled = [np.take_along_axis(a, order, -1) for a in (ids, logprobs)]
    assert_same(record_of(arrays(*shuffled), VOCAB_SIZE, KEPT), expected)


def test_one_entry_more_the_token_that_came_is_left_out_or_was_there_already(expected):
    ids, logprobs = top(KEPT)
    came = INPUT_IDS[:, np.newaxis]
    logprob = np.take_along_axis(LOGPROBS, came, -1)
    more = arrays(np.concatenate([came, ids], -1), np.concatenate([logprob, logprobs], -1))
    assert_same(record_of(more, VOCAB_SIZE, KEPT), expected)


def test_absent_entries_are_counted_out():
    ids, logprobs = top(KEPT)
    ids[1, 2:], logprobs[2, 1], logprobs[3] = -1, np.nan, -np.inf
    record = record_of(arrays(ids, logprobs), VOCAB_SIZE, KEPT)
    np.testing.assert_array_equal(record.targets.count, [4, 2, 3, 0, 4, 4])
    np.testing.assert_array_equal(record.targets.ids[2, :3], ids[2, [0, 2, 3]])
    # Nothing is known of the token whose entries are all absent.
    assert not record.mask[3]
    assert not any(np.any(rows & record.mask) for rows in record.targets.faults().values())


@pytest.mark.parametrize("first", ["empty", "left out"])
def test_prompt_log_probabilities_of_an_engine_become_the_rows_of_the_model(first, expected):
    ids, logprobs = top(KEPT)
    # An engine's row t tells of token t: the model's row t - 1.
    ids, logprobs = ids[:-1], logprobs[:-1]
    if first == "empty":
        ids = np.concatenate([np.full([1, KEPT], -1), ids])
        logprobs = np.concatenate([np.full([1, KEPT], np.nan), logprobs])
    assert_same(record_of(arrays(ids, logprobs), VOCAB_SIZE, KEPT, "prompt"), expected)


def test_rows_of_masked_models_stay_where_they_are_the_last_too():
    record = record_of(arrays(*top(KEPT)), VOCAB_SIZE, KEPT, "same")
    assert record.mask.all()


def test_logits_come_with_or_without_a_normaliser():
    ids, logits = top(KEPT, LOGITS)
    raw = {"input_ids": INPUT_IDS, "ids": ids, "logits": logits}
    assert not has_normaliser(raw)
    assert record_of(raw, VOCAB_SIZE, KEPT).targets.log_z is None
    raw["log_z"] = np.log(np.exp(LOGITS).sum(-1))
    assert has_normaliser(raw)
    _, logprobs = top(KEPT)
    mass = record_of(raw, VOCAB_SIZE, KEPT).targets.log_mass()
    np.testing.assert_allclose(mass, np.log(np.exp(logprobs).sum(-1)), atol=1e-6)


def test_npz_and_parquet_give_the_same_records(tmp_path, expected):
    ids, logprobs = top(KEPT)
    padding = [(0, 2), (0, 0)]
    np.savez(
        tmp_path / "a.npz",
        input_ids=np.pad(INPUT_IDS, (0, 2))[np.newaxis],
        ids=np.pad(ids, padding)[np.newaxis],
        logprobs=np.pad(logprobs, padding)[np.newaxis],
        length=[LENGTH],
    )
    table = {"input_ids": [INPUT_IDS], "ids": [ids.tolist()], "logprobs": [logprobs.tolist()]}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    for name in ("a.npz", "a.parquet"):
        (sequence,) = read_arrays(tmp_path / name)
        assert_same(record_of(sequence, VOCAB_SIZE, KEPT), expected)


def test_rows_of_a_parquet_file_may_differ_in_length_or_be_missing(tmp_path):
    table = {
        "input_ids": [[5, 6, 7], [8]],
        "ids": [[None, [1, 2, 3], [4]], [[9]]],
        "logprobs": [[None, [-2.0, -1.0, -3.0], [-0.5]], [[-0.1]]],
    }
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    first, second = read_arrays(tmp_path / "a.parquet")
    record = record_of(first, VOCAB_SIZE, 2, "prompt")
    np.testing.assert_array_equal(record.targets.ids[:2], [[2, 1], [4, 0]])
    np.testing.assert_array_equal(record.targets.count, [2, 1, 0])
    np.testing.assert_array_equal(second["input_ids"], [8])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"ids": None}, "expected input_ids, ids and either"),
        ({"logprobs": None}, "either logprobs or logits"),
        ({"logits": LOGITS[:, :2]}, "either logprobs or logits"),
    ],
)
def test_a_file_that_lacks_an_array_is_refused(changes, told, tmp_path):
    ids, logprobs = top(2)
    named = {**arrays(ids, logprobs), **changes}
    np.savez(tmp_path / "a.npz", **{n: a[np.newaxis] for n, a in named.items() if a is not None})
    with pytest.raises(ValueError, match=told):
        next(read_arrays(tmp_path / "a.npz"))


def test_what_does_not_belong_together_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected ids of 6 rows.*received 3"):
        record_of(arrays(*top(2, LOGPROBS[:3])), VOCAB_SIZE, 2)
    with pytest.raises(ValueError, match="row_kind must be one of next, prompt, same"):
        record_of(arrays(*top(2)), VOCAB_SIZE, 2, "previous")
    with pytest.raises(ValueError, match=r"one of \.npz, \.parquet"):
        next(read_arrays(tmp_path / "a.csv"))
