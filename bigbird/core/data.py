"""Data sets: checked sources of examples, and documents as batches of ids.

Axis letters: B batch, L length.

The way of a document: `open_source` reads and checks it once -> `endless_examples` gives it in an
order that depends on (seed, epoch) only -> `encode_documents` tokenises, cuts and pads it. Pairs of
document and summary go on in `pairs.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf
from absl import logging

from bigbird.core.corpora.record_files import LABEL, DataError
from bigbird.core.corpora.sources import RecordSource, open_records
from bigbird.core.vocabulary import SpecialTokens, Tokenizer

# Records that are shuffled together; a split of fewer is shuffled whole.
SHUFFLE_WINDOW = 8192


@dataclasses.dataclass(frozen=True)
class ExampleSource:
    """A split that has been read once and found sound.

    Attributes:
      dataset: dicts of scalars `{field: string or int64}`, always in the same order. Texts are
        valid UTF-8.
      num_examples: how many there are, at least 1.
      label_names: class names in the order of their ids, where the source has names.
      description: what messages call the source.
    """

    dataset: tf.data.Dataset
    num_examples: int
    label_names: Sequence[str] | None
    description: str


def open_source(
    data_dir: str,
    split: str | None,
    fields: Sequence[str],
    tfds_data_dir: str | None = None,
    num_labels: int | None = None,
    flag: str = "data_dir",
) -> ExampleSource:
    """Opens a split and checks every record, in one streaming pass.

    Bytes that are not UTF-8 are replaced (U+FFFD) and counted in the log. Empty texts are kept.

    Args:
      data_dir: `tfds://name/config`, `builtin://documents`, a directory or a file; see
        `sources.open_records`.
      split: `train`, `validation` or `test`; None takes every file.
      fields: names of the fields, such as `("text", "label")` or `("document", "summary")`.
      tfds_data_dir: where TFDS keeps prepared data sets; its own default where None.
      num_labels: number of classes; labels must lie in `[0, num_labels)`.
      flag: the flag that gave `data_dir`, which messages name.

    Raises:
      DataError: where there are no files or examples, where a record cannot be read, lacks a field
        or has a label outside its range. The message names the file and record, or the example.
    """
    source = open_records(data_dir, split, fields, tfds_data_dir, flag)
    survey = _survey(source, num_labels)
    if survey.examples == 0:
        raise DataError(f"{source.description} holds no examples.")
    if survey.faulty_label_at >= 0:
        most = "" if num_labels is None else f" and below --num_labels={num_labels}"
        raise DataError(
            f"{source.description}, example {survey.faulty_label_at} (counted from 0): expected a "
            f"label of at least 0{most}; received {survey.faulty_label}. Correct the label, or "
            "--num_labels."
        )
    if survey.undecodable:
        logging.warning(
            "%s: %d of %d examples hold bytes that are not UTF-8; they are replaced by U+FFFD.",
            source.description,
            survey.undecodable,
            survey.examples,
        )
    return ExampleSource(
        dataset=source.records().map(_with_valid_texts),
        num_examples=survey.examples,
        label_names=source.label_names,
        description=source.description,
    )


@dataclasses.dataclass(frozen=True)
class _Survey:
    examples: int
    undecodable: int
    faulty_label_at: int
    faulty_label: int


def _survey(source: RecordSource, num_labels: int | None) -> _Survey:
    """Reads a source once, inside the graph."""
    end_of_labels = tf.int64.max if num_labels is None else num_labels

    def add(state, indexed_record):
        index, record = indexed_record
        valid = _with_valid_texts(record)
        undecodable = tf.reduce_any(
            [record[field] != valid[field] for field in record if field != LABEL]
        )
        label = record.get(LABEL, tf.constant(0, tf.int64))
        is_first_faulty = ((label < 0) | (label >= end_of_labels)) & (state["faulty_label_at"] < 0)
        return {
            "examples": state["examples"] + 1,
            "undecodable": state["undecodable"] + tf.cast(undecodable, tf.int64),
            "faulty_label_at": tf.where(is_first_faulty, index, state["faulty_label_at"]),
            "faulty_label": tf.where(is_first_faulty, label, state["faulty_label"]),
        }

    initial = {"examples": 0, "undecodable": 0, "faulty_label_at": -1, "faulty_label": 0}
    initial = {name: tf.constant(value, tf.int64) for name, value in initial.items()}
    try:
        state = source.records().enumerate().reduce(initial, add)
    except tf.errors.OpError as error:
        source.locate_fault()
        raise DataError(f"{source.description} cannot be read: {error.message}") from error
    return _Survey(**{name: int(value) for name, value in state.items()})


def _with_valid_texts(record: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    return {
        field: value
        if field == LABEL
        else tf.strings.unicode_transcode(value, "UTF-8", "UTF-8", errors="replace")
        for field, value in record.items()
    }


def endless_examples(source: ExampleSource, seed: int, start_example: int = 0) -> tf.data.Dataset:
    """Returns the examples of one epoch after another, each epoch in another order.

    The order depends on `(seed, epoch)` only: it is the same in every process, and a stream from
    `start_example` is exactly the rest of one from 0. Examples before it are read and thrown away
    as raw records; whole epochs before it are not even read. Examples are shuffled within windows
    of `SHUFFLE_WINDOW` records: larger data should not be sorted by class.

    Args:
      source: the examples.
      seed: chooses the orders.
      start_example: number of examples already seen.
    """
    first_epoch, seen = divmod(start_example, source.num_examples)

    def shuffled(epoch):
        def shuffle_window(index, records):
            size = tf.shape(next(iter(records.values())))[0]
            # Epoch and window share one integer of the stateless seed's two.
            order = tf.random.experimental.stateless_shuffle(
                tf.range(size), seed=[seed, epoch * 2**32 + index], alg="philox"
            )
            return {field: tf.gather(values, order) for field, values in records.items()}

        windows = source.dataset.batch(SHUFFLE_WINDOW).enumerate()
        return windows.map(shuffle_window).unbatch()

    return tf.data.Dataset.range(first_epoch, tf.int64.max).flat_map(shuffled).skip(seen)


def check_encoding(tokenizer: Tokenizer, special: SpecialTokens, max_length: int) -> None:
    """Checks what `encode_documents` needs, before any data is read.

    Raises:
      ValueError: for a `max_length` below 3, or special ids outside the vocabulary.
    """
    if max_length < 3:
        raise ValueError(
            f"max_encoder_length={max_length}: expected at least 3, for [CLS], one piece and "
            "[SEP]; raise --max_encoder_length."
        )
    special.check(tokenizer.vocab_size, "pad", "cls", "sep")


def encode_documents(
    text: tf.Tensor,
    tokenizer: Tokenizer,
    special: SpecialTokens,
    max_length: int,
    substitute_newline: str | None = None,
    *,
    pad_to_longest: bool = False,
    block_size: int = 1,
) -> tf.Tensor:
    """Turns documents into ids: `[CLS] piece … piece [SEP] [PAD] …`.

    Args:
      text: strings `[B]`.
      tokenizer: the vocabulary.
      special: ids of CLS, SEP and padding.
      max_length: longest length in tokens; pieces are cut to `max_length - 2`.
      substitute_newline: what takes the place of every line break; None leaves them.
      pad_to_longest: pad to the longest document of the batch, rounded up to whole blocks, instead
        of to `max_length`.
      block_size: tokens of a block, for `pad_to_longest`.

    Returns:
      int32 `[B, L]`; L is `max_length`, and at most that with `pad_to_longest`.

    Raises:
      ValueError: see `check_encoding`.
    """
    check_encoding(tokenizer, special, max_length)
    text = replace_newlines(text, substitute_newline)
    pieces = tokenizer.tokenize(text)[:, : max_length - 2]
    ends = tf.ones([pieces.nrows(), 1], tf.int32)
    ids = tf.concat([special.cls * ends, pieces, special.sep * ends], axis=1)
    return pad_ids(ids, special.pad, max_length, pad_to_longest, block_size)


def replace_newlines(text: tf.Tensor, substitute: str | None) -> tf.Tensor:
    """Puts `substitute` in the place of every line break; None leaves them."""
    if substitute is None:
        return text
    # A backslash in the replacement would refer to a group of the pattern.
    return tf.strings.regex_replace(text, r"\r?\n", substitute.replace("\\", r"\\"))


def pad_ids(
    ids: tf.RaggedTensor, pad: int, max_length: int, pad_to_longest: bool, block_size: int
) -> tf.Tensor:
    """Pads ids `[B, (length)]`, none longer than `max_length`; see `encode_documents`.

    A batch of empty documents alone still has one block.
    """
    padded = ids.to_tensor(pad, shape=[None, max_length])
    if not pad_to_longest:
        return padded
    longest = tf.maximum(ids.bounding_shape(axis=1), 1)
    return padded[:, : -(-longest // block_size) * block_size]


def classification_dataset(
    source: ExampleSource,
    tokenizer: Tokenizer,
    special: SpecialTokens,
    max_length: int,
    batch_size: int,
    *,
    training: bool,
    seed: int = 0,
    start_step: int = 0,
    substitute_newline: str | None = None,
    pad_to_batch: bool = False,
    block_size: int = 1,
) -> tf.data.Dataset:
    """Returns batches `(ids, labels)` of a source with the fields `text` and `label`.

    Args:
      source: the examples, from `open_source`.
      tokenizer: the vocabulary.
      special: ids of CLS, SEP and padding.
      max_length: longest length in tokens.
      batch_size: documents of a batch.
      training: endless, shuffled, every batch full; otherwise every example once and in order,
        where the last batch may be smaller.
      seed: with the epoch, decides the order in training.
      start_step: number of training batches already seen; the stream is exactly the rest.
      substitute_newline: what takes the place of every line break; None leaves them.
      pad_to_batch: pad to the longest document of a batch instead of to `max_length`.
      block_size: with `pad_to_batch`, lengths are rounded up to a multiple of it.

    Returns:
      A dataset of ids int32 `[B, L]` and labels int32 `[B]`.

    Raises:
      ValueError: for a batch size or start below their range, and as `encode_documents`.
    """
    check_encoding(tokenizer, special, max_length)

    def encode(batch):
        ids = encode_documents(
            batch["text"],
            tokenizer,
            special,
            max_length,
            substitute_newline,
            pad_to_longest=pad_to_batch,
            block_size=block_size,
        )
        return ids, tf.cast(batch[LABEL], tf.int32)

    batches = example_batches(
        source, batch_size, training=training, seed=seed, start_step=start_step
    )
    return batches.map(encode, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def example_batches(
    source: ExampleSource, batch_size: int, *, training: bool, seed: int, start_step: int
) -> tf.data.Dataset:
    """Returns batches of examples as they are read; see `classification_dataset`.

    Raises:
      ValueError: for a batch size or start below their range.
    """
    if batch_size < 1 or start_step < 0:
        raise ValueError(
            "Expected batch_size >= 1 and start_step >= 0; received "
            f"batch_size={batch_size}, start_step={start_step}."
        )
    examples = source.dataset
    if training:
        examples = endless_examples(source, seed, start_step * batch_size)
    # A size that the graph knows is what memory is planned for.
    return examples.batch(batch_size, drop_remainder=training)
