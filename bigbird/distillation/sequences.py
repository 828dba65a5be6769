"""Documents as the sequences a teacher reads, one after another, the same in every process.

Axis letters: L tokens of a sequence, T target tokens.

Each function returns a finite dataset of dicts without padding: `input_ids` int32 `[L]`, `mask`
bool, the tokens whose distribution is learned, and what else the kind of model needs.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from bigbird.core.data import ExampleSource, replace_newlines
from bigbird.core.pairs import PairEncoder
from bigbird.core.vocabulary import SpecialTokens, Tokenizer
from bigbird.pretrain.masking import WordMasker


def document_windows(
    source: ExampleSource,
    tokenizer: Tokenizer,
    special: SpecialTokens,
    max_length: int,
    *,
    substitute_newline: str | None = None,
    split_documents: bool = False,
) -> tf.data.Dataset:
    """Returns `[CLS] piece … piece [SEP]` of documents: int32 `[L]`, L at most `max_length`.

    Args:
      source: examples with the field `text`.
      tokenizer, special, max_length, substitute_newline: as in `data.encode_documents`.
      split_documents: whether the rest of a long document makes further sequences; otherwise it is
        cut off.

    Raises:
      ValueError: for a `max_length` below 3, or special ids outside the vocabulary.
    """
    if max_length < 3:
        raise ValueError(
            f"max_length={max_length}: expected at least 3, for [CLS], one piece and [SEP]; raise "
            "--max_encoder_length."
        )
    special.check(tokenizer.vocab_size, "cls", "sep")
    size = max_length - 2

    def windows(example):
        text = replace_newlines(example["text"], substitute_newline)
        pieces = tokenizer.tokenize(text[tf.newaxis])[0]
        count = tf.maximum(-(-tf.size(pieces) // size), 1) if split_documents else 1
        starts = tf.data.Dataset.range(tf.cast(count, tf.int64))

        def window(number):
            start = tf.cast(number, tf.int32) * size
            part = pieces[start : start + size]
            return tf.concat([[special.cls], part, [special.sep]], axis=0)

        return starts.map(window)

    return source.dataset.flat_map(windows)


def masked_sequences(
    source: ExampleSource, masker: WordMasker, *, copies: int = 1, seed: int = 0
) -> tf.data.Dataset:
    """Windows of documents with hidden words: `mask` tells which, `labels` what they were, else -1.

    What is drawn depends on (seed, place of the document, copy) only.

    Args:
      source: examples with the field `text`.
      masker: draws a window and hides words of it.
      copies: windows of each document.
      seed: with the place in the data, decides what is drawn.

    Raises:
      ValueError: for less than one copy.
    """
    if copies < 1:
        raise ValueError(f"copies={copies}: expected at least 1.")

    def windows(place, example):
        numbers = tf.data.Dataset.range(place * copies, (place + 1) * copies)
        return numbers.map(lambda number: hide(example["text"], number))

    def hide(text, number):
        features = masker(text, tf.stack([tf.constant(seed, tf.int64), number]))
        places = features["masked_lm_positions"][:, tf.newaxis]
        is_prediction = tf.cast(features["masked_lm_weights"], tf.int32)
        shape = [masker.max_encoder_length]
        mask = tf.scatter_nd(places, is_prediction, shape) > 0
        labels = tf.scatter_nd(places, features["masked_lm_ids"] * is_prediction, shape)
        whole = {
            "input_ids": features["input_ids"],
            "mask": mask,
            "labels": tf.where(mask, labels, -1),
        }
        is_token = features["input_ids"] != masker.special.pad
        return {name: tf.boolean_mask(values, is_token) for name, values in whole.items()}

    return source.dataset.enumerate().flat_map(windows)


def next_token_sequences(windows: tf.data.Dataset) -> tf.data.Dataset:
    """Sequences for models that predict the next token: every token but the last takes part."""

    def mark(ids):
        return {"input_ids": ids, "mask": tf.range(tf.size(ids)) < tf.size(ids) - 1}

    return windows.map(mark)


def pair_sequences(source: ExampleSource, encoder: PairEncoder) -> tf.data.Dataset:
    """Documents with their summaries, `target_ids` `[T]`, all of whose words take part."""

    def encode(example):
        ids = encoder.documents(example["document"][tf.newaxis], pad_to_longest=True)[0]
        target_ids = encoder.summaries(example["summary"][tf.newaxis], pad_to_longest=True)[0]
        return {
            "input_ids": tf.boolean_mask(ids, ids != encoder.special.pad),
            "target_ids": target_ids,
            "mask": tf.ones_like(target_ids, tf.bool),
        }

    return source.dataset.map(encode, num_parallel_calls=tf.data.AUTOTUNE)


def packed_sequences(sequences: tf.data.Dataset, max_length: int) -> tf.data.Dataset:
    """Short sequences one behind the other, as many as fit, with `document_ids` from 1.

    For models that read `document_ids` and attend within a document only. Sequences keep their
    order; where one does not fit, the next pack begins.

    Args:
      sequences: dicts of arrays `[L]`, such as `next_token_sequences` gives.
      max_length: longest pack; a longer sequence is cut.
    """
    signature = {**sequences.element_spec, "document_ids": tf.TensorSpec([None], tf.int32)}

    def packs():
        pack = []
        for sequence in sequences.as_numpy_iterator():
            sequence = {name: values[:max_length] for name, values in sequence.items()}
            if pack and sum(map(_length, pack)) + _length(sequence) > max_length:
                yield _join(pack)
                pack = []
            pack.append(sequence)
        if pack:
            yield _join(pack)

    return tf.data.Dataset.from_generator(packs, output_signature=signature)


def _length(sequence):
    return len(sequence["input_ids"])


def _join(pack):
    joined = {name: np.concatenate([sequence[name] for sequence in pack]) for name in pack[0]}
    numbers = np.arange(1, len(pack) + 1, dtype=np.int32)
    return {**joined, "document_ids": np.repeat(numbers, [*map(_length, pack)])}
