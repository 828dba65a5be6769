"""Documents as the sequences a teacher reads, one after another, the same in every process.

Axis letters: L tokens of a sequence, T target tokens.

Each function returns a finite dataset of dicts without padding: `input_ids` int32 `[L]`, `mask`
bool, the tokens whose distribution is learned, and what else the kind of model needs.
"""

from __future__ import annotations

import tensorflow as tf

from bigbird.core.data import ExampleSource, replace_newlines
from bigbird.core.pairs import PairEncoder
from bigbird.core.vocabulary import SpecialTokens, Tokenizer

# Of the words to predict, as many are replaced by [MASK], and half of the rest by a random word.
# Devlin et al., arXiv:1810.04805, section 3.1.
MASK_SHARE = 0.8


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
    windows: tf.data.Dataset,
    special: SpecialTokens,
    vocab_size: int,
    *,
    masked_lm_prob: float = 0.15,
    seed: int = 0,
) -> tf.data.Dataset:
    """Hides words of sequences: `input_ids`, `mask` of the hidden ones, `labels` there, else -1.

    Which words are hidden depends on (seed, place in the data) only. A sequence with a word hides
    at least one.

    Args:
      windows: from `document_windows`.
      special: ids that are never hidden, and that of [MASK].
      vocab_size: number of words.
      masked_lm_prob: share of hidden words.
      seed: chooses them.

    Raises:
      ValueError: for a share outside (0, 1], or a [MASK] outside the vocabulary.
    """
    if not 0 < masked_lm_prob <= 1:
        raise ValueError(f"masked_lm_prob={masked_lm_prob}: expected a share in (0, 1].")
    special.check(vocab_size, "mask")

    def hide(place, ids):
        is_word = (ids != special.cls) & (ids != special.sep) & (ids != special.pad)
        draws = tf.random.stateless_uniform([3, tf.size(ids)], [seed, place], alg="philox")
        lots = tf.where(is_word, draws[0], 1.0)
        mask = is_word & ((lots < masked_lm_prob) | (lots <= tf.reduce_min(lots)))
        random_words = tf.cast(draws[2] * tf.cast(vocab_size, tf.float32), tf.int32)
        input_ids = tf.where(mask & (draws[1] < MASK_SHARE), special.mask, ids)
        is_random = mask & (draws[1] >= (1 + MASK_SHARE) / 2)
        input_ids = tf.where(is_random, tf.minimum(random_words, vocab_size - 1), input_ids)
        return {"input_ids": input_ids, "mask": mask, "labels": tf.where(mask, ids, -1)}

    return windows.enumerate().map(hide, num_parallel_calls=tf.data.AUTOTUNE)


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
