"""Pairs of document and summary as batches of ids, for training an encoder-decoder.

Axis letters: B batch, L length of documents, T length of summaries.

A document is its pieces alone; a summary is its pieces and EOS. What is cut is counted beforehand
(`survey_pairs`), so that a run says what it cannot see.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import tensorflow as tf
from absl import logging

from bigbird.core.data import ExampleSource, example_batches, pad_ids, replace_newlines
from bigbird.core.vocabulary import SpecialTokens, Tokenizer

# The vocabularies mark newlines, citations and the like by `<n>`, `[CLS]`: no blank before a mark.
_BLANK_BEFORE_MARK = r" (<[^\s<>]+>|\[[^\s\[\]]+\])"

_SURVEY_BATCH = 64


@dataclasses.dataclass(frozen=True)
class PairEncoder:
    """How texts become ids, the same in training, evaluation and the exported model.

    Attributes:
      tokenizer: the vocabulary.
      special: ids of EOS and padding.
      max_encoder_length: longest document in tokens; more is cut.
      max_decoder_length: longest summary in tokens, with its EOS; more is cut, the EOS too.
      substitute_newline: what takes the place of every line break; None leaves them.
      block_size: lengths padded to the longest are rounded up to a multiple of it.

    Raises:
      ValueError: for lengths below their range, or a vocabulary without these special ids.
    """

    tokenizer: Tokenizer
    special: SpecialTokens
    max_encoder_length: int
    max_decoder_length: int
    substitute_newline: str | None = None
    block_size: int = 1

    def __post_init__(self):
        for field, least in (("max_encoder_length", 1), ("max_decoder_length", 2)):
            if getattr(self, field) < least:
                raise ValueError(
                    f"{field}={getattr(self, field)}: expected at least {least}; raise --{field}."
                )
        self.special.check(self.tokenizer.vocab_size, "pad", "eos", "bos")
        self.tokenizer.check_end_of_sequence(self.special)

    def documents(self, text: tf.Tensor, pad_to_longest: bool = False) -> tf.Tensor:
        """Strings `[B]` -> int32 `[B, L]`, L the model's or, padded to the longest, less."""
        ids = self._pieces(text)[:, : self.max_encoder_length]
        return pad_ids(
            ids, self.special.pad, self.max_encoder_length, pad_to_longest, self.block_size
        )

    def summaries(self, text: tf.Tensor, pad_to_longest: bool = False) -> tf.Tensor:
        """Strings `[B]` -> int32 `[B, T]`."""
        ids = self.whole_summaries(text)[:, : self.max_decoder_length]
        return pad_ids(ids, self.special.pad, self.max_decoder_length, pad_to_longest, block_size=1)

    def whole_summaries(self, text: tf.Tensor) -> tf.RaggedTensor:
        """Strings `[B]` -> ids with EOS `[B, (length)]`, uncut."""
        pieces = self._pieces(text)
        return tf.concat([pieces, tf.fill([pieces.nrows(), 1], self.special.eos)], axis=1)

    def texts(self, ids: tf.Tensor) -> tf.Tensor:
        """Ids `[B, T]` -> strings `[B]`: what stands before EOS, its newlines restored."""
        is_end = tf.equal(ids, self.special.eos) | tf.equal(ids, self.special.pad)
        before_end = tf.equal(tf.cumsum(tf.cast(is_end, tf.int32), axis=1), 0)
        return self.restore_newlines(
            self.tokenizer.detokenize(tf.ragged.boolean_mask(ids, before_end))
        )

    def restore_newlines(self, text: tf.Tensor) -> tf.Tensor:
        """Puts a line break in the place of every `substitute_newline` and the blanks around it.

        A substitute of blanks alone cannot be told from other blanks: the text stays as it is.
        """
        if not (self.substitute_newline or "").strip():
            return text
        mark = re.escape(self.substitute_newline.strip())
        return tf.strings.regex_replace(text, rf"\s*{mark}\s*", "\n")

    def _pieces(self, text):
        text = replace_newlines(text, self.substitute_newline)
        text = tf.strings.regex_replace(text, _BLANK_BEFORE_MARK, r"\1")
        return self.tokenizer.tokenize(text)


def pair_dataset(
    source: ExampleSource,
    encoder: PairEncoder,
    batch_size: int,
    *,
    training: bool,
    seed: int = 0,
    start_step: int = 0,
    pad_to_batch: bool = False,
) -> tf.data.Dataset:
    """Returns batches `(document ids, summary ids)` of a source of pairs.

    Args:
      source: the examples, from `open_source` with the fields `document` and `summary`.
      encoder: makes the ids.
      batch_size: pairs of a batch.
      training: endless, shuffled, every batch full; otherwise every pair once and in order, where
        the last batch may be smaller.
      seed: with the epoch, decides the order in training.
      start_step: number of training batches already seen; the stream is exactly the rest.
      pad_to_batch: pad to the longest document and summary of a batch instead of to the model's
        lengths.

    Returns:
      A dataset of int32 `[B, L]` and `[B, T]`.

    Raises:
      ValueError: for a batch size or start below their range.
    """

    def encode(batch):
        return (
            encoder.documents(batch["document"], pad_to_batch),
            encoder.summaries(batch["summary"], pad_to_batch),
        )

    batches = example_batches(
        source, batch_size, training=training, seed=seed, start_step=start_step
    )
    return batches.map(encode, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


@dataclasses.dataclass(frozen=True)
class PairSurvey:
    """What one pass over the pairs finds.

    Attributes:
      examples: number of pairs.
      tokens: number of target tokens, EOS included, after the cut.
      cut: summaries longer than `max_decoder_length` with their EOS.
      empty_documents: documents of white space alone.
      empty_summaries: summaries without a piece.
      unigram_entropy: of the target tokens, in nats: the cross entropy of a model that knows how
        often each token occurs and nothing else.
    """

    examples: int
    tokens: int
    cut: int
    empty_documents: int
    empty_summaries: int
    unigram_entropy: float


def survey_pairs(source: ExampleSource, encoder: PairEncoder) -> PairSurvey:
    """Reads a source once, counts what training would not show, and logs what is amiss."""

    def measure(batch):
        lengths = encoder.whole_summaries(batch["summary"]).row_lengths()
        ids = encoder.summaries(batch["summary"])
        return {
            "cut": lengths > encoder.max_decoder_length,
            "empty_summaries": tf.equal(lengths, 1),
            "empty_documents": _is_empty(batch["document"]),
            "targets": ids,
        }

    counts = np.zeros(encoder.tokenizer.vocab_size, np.int64)
    totals = dict.fromkeys(("cut", "empty_summaries", "empty_documents"), 0)
    batches = source.dataset.batch(_SURVEY_BATCH)
    for found in batches.map(measure, num_parallel_calls=tf.data.AUTOTUNE).as_numpy_iterator():
        targets = found.pop("targets")
        counts += np.bincount(targets[targets != encoder.special.pad], minlength=len(counts))
        for name, flags in found.items():
            totals[name] += int(flags.sum())
    frequencies = counts[counts > 0] / counts.sum()
    survey = PairSurvey(
        examples=source.num_examples,
        tokens=int(counts.sum()),
        unigram_entropy=float(-np.sum(frequencies * np.log(frequencies))),
        **totals,
    )
    _log(survey, source, encoder)
    return survey


def warn_of_empty_documents(source: ExampleSource) -> None:
    """Counts the documents of white space alone, whose summaries mean nothing, and logs them."""

    def count(empty, example):
        return empty + tf.cast(_is_empty(example["document"]), tf.int64)

    empty = int(source.dataset.reduce(tf.constant(0, tf.int64), count))
    _warn(source, empty, "documents are empty: their summaries come from nothing")


def _is_empty(text):
    return tf.equal(tf.strings.length(tf.strings.strip(text)), 0)


def _log(survey: PairSurvey, source: ExampleSource, encoder: PairEncoder):
    longest = f"--max_decoder_length={encoder.max_decoder_length}"
    _warn(source, survey.cut, f"summaries are longer than {longest} tokens and are cut")
    _warn(source, survey.empty_documents, "documents are empty: their summaries come from nothing")
    _warn(source, survey.empty_summaries, "summaries are empty: the model learns to end at once")


def _warn(source: ExampleSource, count: int, what: str):
    if count:
        logging.warning("%s: %d of %d %s.", source.description, count, source.num_examples, what)
