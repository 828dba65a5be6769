"""Batches of pretraining: documents masked anew in every epoch, or records that are masked already.

Axis letters: B batch, L length, P predictions of a sequence.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from bigbird.core.corpora.record_files import DataError, file_kind, raw_records
from bigbird.core.corpora.sources import find_files
from bigbird.core.data import ExampleSource, endless_examples
from bigbird.pretrain.masking import WordMasker

RECORD = "record"


@dataclasses.dataclass(frozen=True)
class RecordParser:
    """Parses `tf.train.Example`s that hold the features of `WordMasker`, as in 2021.

    Attributes:
      max_encoder_length: L of the records.
      max_predictions_per_seq: P of the records.
    """

    max_encoder_length: int
    max_predictions_per_seq: int

    def __call__(self, record: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the features of one record, integers as int32."""
        parsed = tf.io.parse_single_example(record, self._features())
        return {
            name: tf.cast(value, tf.int32) if value.dtype == tf.int64 else value
            for name, value in parsed.items()
        }

    def fault(self, record: bytes) -> str | None:
        """Returns what is wrong with a record that cannot be parsed; None if it can."""
        try:
            self(tf.constant(record))
        except tf.errors.OpError as error:
            return error.message
        return None

    def _features(self):
        length, predictions = [self.max_encoder_length], [self.max_predictions_per_seq]
        return {
            "input_ids": tf.io.FixedLenFeature(length, tf.int64),
            "segment_ids": tf.io.FixedLenFeature(length, tf.int64),
            "masked_lm_positions": tf.io.FixedLenFeature(predictions, tf.int64),
            "masked_lm_ids": tf.io.FixedLenFeature(predictions, tf.int64),
            "masked_lm_weights": tf.io.FixedLenFeature(predictions, tf.float32),
            "next_sentence_labels": tf.io.FixedLenFeature([1], tf.int64),
        }


def open_records(
    data_dir: str, split: str | None, parser: RecordParser, vocab_size: int
) -> ExampleSource:
    """Opens TFRecord files of preprocessed examples and checks every record.

    Returns:
      A source of unparsed records, the field `record`.

    Raises:
      DataError: where there are none, or one cannot be parsed or has ids outside the vocabulary.
    """
    files = find_files(data_dir, split)
    if file_kind(files[0]) != "tfrecord":
        raise DataError(f"--preprocessed_data needs TFRecord files; {files[0]} is none.")
    records = tf.data.TFRecordDataset(files)

    def add(state, record):
        count, largest = state
        features = parser(record)
        ids = [tf.reduce_max(features[name]) for name in ("input_ids", "masked_lm_ids")]
        return count + 1, tf.reduce_max([largest, *ids])

    try:
        count, largest = records.reduce((tf.constant(0, tf.int64), tf.constant(0)), add)
    except tf.errors.OpError as error:
        for where, record in raw_records(files):
            if fault := parser.fault(record):
                raise DataError(
                    f"{where}: expected the features of --max_encoder_length and "
                    f"--max_predictions_per_seq it was made with. ({fault})"
                ) from error
        raise
    if count == 0:
        raise DataError(f"{files[0]} holds no examples.")
    if largest >= vocab_size:
        raise DataError(
            f"{files[0]} and its like hold the id {int(largest)}, and the vocabulary has "
            f"{vocab_size}: give the --vocab_model_file they were made with."
        )
    return ExampleSource(
        dataset=records.map(lambda record: {RECORD: record}),
        num_examples=int(count),
        label_names=None,
        description=files[0],
    )


def pretraining_dataset(
    source: ExampleSource,
    make_features: WordMasker | RecordParser,
    batch_size: int,
    *,
    training: bool,
    seed: int = 0,
    start_step: int = 0,
    crop_to_block: int | None = None,
    pad_id: int = 0,
) -> tf.data.Dataset:
    """Returns batches of the features of `WordMasker`.

    Args:
      source: documents (the field `text`), or records that are masked already (`record`).
      make_features: what turns an example into features.
      batch_size: examples of a batch.
      training: endless, shuffled, every batch full; otherwise every example once and in order,
        masked alike each time, where the last batch may be smaller.
      seed: decides the order of training and what is hidden.
      start_step: number of training batches already seen; the stream is exactly the rest.
      crop_to_block: cuts the padding behind the longest example of a batch, rounded up to a
        multiple of this.
      pad_id: id of padding.
    """
    first = start_step * batch_size if training else 0
    examples = endless_examples(source, seed, first) if training else source.dataset

    def features(number, example):
        if isinstance(make_features, RecordParser):
            return make_features(example[RECORD])
        return make_features(example["text"], tf.stack([tf.constant(seed, tf.int64), number]))

    numbered = examples.enumerate(first)
    made = numbered.map(features, num_parallel_calls=tf.data.AUTOTUNE)
    batches = made.batch(batch_size, drop_remainder=training)
    if crop_to_block is not None:
        batches = batches.map(lambda batch: _cropped(batch, crop_to_block, pad_id))
    return batches.prefetch(tf.data.AUTOTUNE)


def _cropped(batch, block_size, pad_id):
    ids = batch["input_ids"]
    is_used = tf.reduce_any(ids != pad_id, axis=0)
    length = tf.reduce_max(tf.where(is_used, tf.range(1, tf.size(is_used) + 1), 0))
    end = -(-length // block_size) * block_size
    return {**batch, "input_ids": ids[:, :end], "segment_ids": batch["segment_ids"][:, :end]}
