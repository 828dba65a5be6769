"""Hidden words: whole, in the shares of 2021, within their limits, and the same for one seed."""

import numpy as np
import pytest
import tensorflow as tf

from bigbird.core.corpora.record_files import DataError
from bigbird.core.data import open_source
from bigbird.core.vocabulary import SpecialTokens, Tokenizer
from bigbird.pretrain.batches import RecordParser, open_records, pretraining_dataset
from bigbird.pretrain.masking import WordMasker

SPECIAL = SpecialTokens()
TEXT = "attention block sparse dense matrix memory gradient layer token window " * 4


@pytest.fixture(scope="module")
def tokenizer(vocabulary_file):
    return Tokenizer(vocabulary_file)


@pytest.fixture
def make_masker(tokenizer):
    def make(length=24, predictions=8, share=0.3, newline=None):
        return WordMasker(tokenizer, SPECIAL, length, predictions, share, newline)

    return make


def _examples(masker, text, count):
    """Examples of one document for the seeds (0, 0) … (0, count - 1)."""
    seeds = tf.data.Dataset.range(count)
    made = seeds.map(lambda i: masker(tf.constant(text), tf.stack([tf.constant(0, tf.int64), i])))
    return [{k: v.numpy() for k, v in example.items()} for example in made]


def _original(example):
    """The ids before words were hidden."""
    ids = example["input_ids"].copy()
    shown = example["masked_lm_weights"] > 0
    ids[example["masked_lm_positions"][shown]] = example["masked_lm_ids"][shown]
    return ids


def test_an_example_is_a_window_of_the_document_that_starts_with_a_word(tokenizer, make_masker):
    pieces = tokenizer.tokenize([TEXT])[0].numpy()
    starts = tokenizer.word_starts()
    found = set()
    for example in _examples(make_masker(), TEXT, 50):
        ids = _original(example)
        end = np.flatnonzero(ids == SPECIAL.sep)[0]
        assert ids[0] == SPECIAL.cls and starts[ids[1]] and (ids[end + 1 :] == SPECIAL.pad).all()
        window = ids[1:end]
        places = range(len(pieces) - len(window) + 1)
        places = [i for i in places if (pieces[i : i + len(window)] == window).all()]
        assert places
        found.add(places[0])
    assert len(found) > 5


def test_whole_words_are_hidden_and_no_more_than_the_share(tokenizer, make_masker):
    starts = tokenizer.word_starts()
    for example in _examples(make_masker(predictions=20), TEXT, 50):
        ids = _original(example)
        end = np.flatnonzero(ids == SPECIAL.sep)[0]
        word = np.cumsum(starts[ids[1:end]])
        weights = example["masked_lm_weights"]
        positions = example["masked_lm_positions"][weights > 0]
        assert (np.diff(positions) > 0).all() and positions.min() >= 1 and positions.max() < end
        words = set(word[positions - 1])
        assert len(words) == max(1, round(word[-1] * 0.3))
        assert sum(np.isin(word, list(words))) == len(positions)
        assert not example["masked_lm_positions"][weights == 0].any()
        assert not example["masked_lm_ids"][weights == 0].any()


def test_a_word_that_does_not_fit_is_not_hidden_in_part(tokenizer, make_masker):
    starts = tokenizer.word_starts()
    for example in _examples(make_masker(predictions=5, share=1.0), TEXT, 50):
        ids = _original(example)
        end = np.flatnonzero(ids == SPECIAL.sep)[0]
        word = np.cumsum(starts[ids[1:end]])
        hidden = word[example["masked_lm_positions"][example["masked_lm_weights"] > 0] - 1]
        sizes = [(word == w).sum() == (hidden == w).sum() for w in set(hidden)]
        assert 1 <= len(hidden) <= 5 and (all(sizes) or len(set(hidden)) == 1)


def test_eight_of_ten_become_the_mask_one_a_random_piece_and_one_stays(make_masker):
    masked = kept = total = 0
    for example in _examples(make_masker(length=64, predictions=40, share=1.0), TEXT, 100):
        shown = example["masked_lm_weights"] > 0
        ids = example["input_ids"][example["masked_lm_positions"][shown]]
        masked += (ids == SPECIAL.mask).sum()
        kept += (ids == example["masked_lm_ids"][shown]).sum()
        random = ids[(ids != SPECIAL.mask) & (ids != example["masked_lm_ids"][shown])]
        assert not np.isin(random, [0, 1, 2, 65, 66, 67]).any()
        total += shown.sum()
    # Within four standard deviations of a share of about 3,000.
    assert total > 2000
    assert abs(masked / total - 0.8) < 0.03
    assert abs(kept / total - 0.1) < 0.03


@pytest.mark.parametrize("text", ["", " ", "token", "\0", "x" * 500, "caf\u00e9 " * 3])
def test_any_document_gives_an_example(make_masker, text):
    for predictions in (2, 30):
        (example,) = _examples(make_masker(predictions=predictions), text, 1)
        assert example["input_ids"].shape == (24,)
        assert example["masked_lm_positions"].shape == (predictions,)
        assert (example["input_ids"] == SPECIAL.sep).sum() == 1
        assert example["masked_lm_weights"].sum() <= predictions
        if not text.strip():
            assert example["masked_lm_weights"].sum() == 0


def test_line_breaks_are_replaced(make_masker):
    one, two = make_masker(newline=" "), make_masker()
    a = _original(_examples(one, "token\nwindow", 1)[0])
    b = _original(_examples(two, "token window", 1)[0])
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"length": 2}, "max_encoder_length=2"),
        ({"predictions": 0}, "max_predictions_per_seq=0"),
        ({"share": 0.0}, "masked_lm_prob=0.0"),
        ({"share": 1.5}, "masked_lm_prob=1.5"),
    ],
)
def test_values_outside_their_ranges_are_told(make_masker, changes, told):
    with pytest.raises(ValueError, match=told):
        make_masker(**changes)


@pytest.fixture
def source(tmp_path, write_jsonl):
    records = [{"text": f"{'token ' * n}window matrix {'layer ' * n}"} for n in range(1, 8)]
    write_jsonl(tmp_path / "train.jsonl", records)
    return open_source(str(tmp_path), "train", ("text",))


def _batches(dataset, count):
    return [{k: v.numpy() for k, v in batch.items()} for batch in dataset.take(count)]


def test_a_stream_from_a_later_step_is_exactly_the_rest(source, make_masker):
    def batches(start, count):
        dataset = pretraining_dataset(
            source, make_masker(), 3, training=True, seed=5, start_step=start
        )
        return _batches(dataset, count)

    for old, new in zip(batches(0, 7)[4:], batches(4, 3), strict=True):
        for name, value in old.items():
            np.testing.assert_array_equal(value, new[name])


def test_every_epoch_and_seed_hides_other_words_and_evaluation_the_same(source, make_masker):
    def ids(seed, training, count):
        dataset = pretraining_dataset(source, make_masker(), 7, training=training, seed=seed)
        return [np.sort(b["input_ids"], axis=0) for b in _batches(dataset, count)]

    first, second = ids(0, True, 2)
    assert (first != second).any() and (first != ids(1, True, 1)[0]).any()
    np.testing.assert_array_equal(ids(0, False, 2)[0], ids(0, False, 2)[0])
    assert len(ids(0, False, 9)) == 1


def test_cropping_leaves_out_padding_only(source, make_masker):
    whole, cropped = (
        _batches(pretraining_dataset(source, make_masker(), 2, training=False, crop_to_block=c), 4)
        for c in (None, 8)
    )
    lengths = set()
    for old, new in zip(whole, cropped, strict=True):
        length = new["input_ids"].shape[1]
        lengths.add(length)
        assert length % 8 == 0 and new["segment_ids"].shape == new["input_ids"].shape
        np.testing.assert_array_equal(old["input_ids"][:, :length], new["input_ids"])
        assert not old["input_ids"][:, length:].any()
        assert old["input_ids"][:, length - 8 :].any()
    assert len(lengths) > 1


# ------------------------------------------------------------------------- preprocessed records


def _record(**changes):
    integers = {
        "input_ids": [65, 3, 67, 66],
        "segment_ids": [0, 0, 1, 1],
        "masked_lm_positions": [2, 0],
        "masked_lm_ids": [9, 0],
        "next_sentence_labels": [1],
        **changes,
    }
    features = {
        name: tf.train.Feature(int64_list=tf.train.Int64List(value=values))
        for name, values in integers.items()
    }
    features["masked_lm_weights"] = tf.train.Feature(
        float_list=tf.train.FloatList(value=[1.0, 0.0])
    )
    example = tf.train.Example(features=tf.train.Features(feature=features))
    return example.SerializeToString()


def _write_records(path, records):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)


def test_preprocessed_records_are_read_as_they_are(tmp_path):
    _write_records(tmp_path / "train.tfrecord", [_record(), _record(input_ids=[65, 4, 67, 66])])
    parser = RecordParser(4, 2)
    source = open_records(str(tmp_path), "train", parser, vocab_size=100)
    (batch,) = _batches(pretraining_dataset(source, parser, 2, training=False), 2)
    np.testing.assert_array_equal(batch["input_ids"], [[65, 3, 67, 66], [65, 4, 67, 66]])
    np.testing.assert_array_equal(batch["segment_ids"], [[0, 0, 1, 1]] * 2)
    np.testing.assert_array_equal(batch["masked_lm_weights"], [[1, 0]] * 2)
    np.testing.assert_array_equal(batch["next_sentence_labels"], [[1], [1]])
    assert batch["input_ids"].dtype == np.int32


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (_record(input_ids=[65, 66]), "record 1: expected the features of --max_encoder_length"),
        (b"no example", "record 1: expected the features"),
        (_record(masked_lm_ids=[100, 0]), "hold the id 100"),
    ],
)
def test_a_faulty_preprocessed_record_is_told(tmp_path, record, told):
    _write_records(tmp_path / "train.tfrecord", [_record(), record])
    with pytest.raises(DataError, match=told):
        open_records(str(tmp_path), "train", RecordParser(4, 2), vocab_size=100)
