"""Runs a teacher over sequences: its K largest logits and normalisers, chunk by chunk.

Axis letters: B batch, L length, D model, V vocabulary, K kept, C tokens of a chunk.

Logits exist for one chunk at a time, `[C, V]`, and only for tokens that take part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from bigbird.core.training import inference_context
from bigbird.distillation.cache_format import RecordFormat, TeacherRecord, sequence_key
from bigbird.distillation.kl_plan import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    FLOAT32_BYTES,
    SMALLEST_CHUNK_TOKENS,
)
from bigbird.distillation.students import LanguageModel
from bigbird.distillation.targets import TopKTargets

# Shortest length that a batch, or a chunk, is padded to; the others are its doubles.
_SHORTEST = 32
# Features that are padded with something else than 0, or the id of padding.
_ID_FEATURES = ("input_ids", "target_ids")


class TopKTeacher:
    """A teacher that says of sequences what a cache stores.

    Batches, and the chunks of their tokens, are padded to a power of two times 32 tokens, at most
    to the longest length and the largest chunk, so that few shapes are traced. What is said of a
    sequence depends on the batch it is in by rounding alone, so equal batches give equal bytes.
    """

    def __init__(
        self,
        model: LanguageModel,
        layout: RecordFormat,
        *,
        batch_size: int,
        max_length: int,
        pad_id: int = 0,
        chunk_tokens: int | None = None,
        jit_compile: bool = False,
    ):
        """Prepares a teacher.

        Args:
          model: the teacher.
          layout: what to keep of it.
          batch_size: sequences that it reads at a time.
          max_length: longest length of a sequence.
          pad_id: id that fills up ids.
          chunk_tokens: C; None takes what keeps the logits of a chunk at 256 MiB, at most 1,024.
          jit_compile: whether XLA compiles the teacher.

        Raises:
          ValueError: for a head of another vocabulary than the layout's.
        """
        if model.vocab_size != layout.vocab_size:
            raise ValueError(
                f"The teacher's head has {model.vocab_size} words, and the cache is for "
                f"vocab_size={layout.vocab_size}."
            )
        self._model, self._layout = model, layout
        self._batch_size, self._max_length, self._pad_id = batch_size, max_length, pad_id
        fitting = CHUNK_BYTES // (FLOAT32_BYTES * layout.vocab_size)
        self._chunk_tokens = chunk_tokens or min(max(fitting, SMALLEST_CHUNK_TOKENS), CHUNK_TOKENS)
        self._hidden_states = tf.function(
            self._hidden_states_of, autograph=False, jit_compile=jit_compile
        )
        self._top = tf.function(self._top_of_chunk, autograph=False, jit_compile=jit_compile)

    def records(self, sequences: Sequence[Mapping[str, np.ndarray]]) -> Iterator[TeacherRecord]:
        """Says what the teacher thinks of sequences, in their order.

        Args:
          sequences: dicts of `input_ids` `[L]` and, where there are any, `target_ids`, `mask`,
            `labels`, `document_ids`.
        """
        for start in range(0, len(sequences), self._batch_size):
            batch = sequences[start : start + self._batch_size]
            # A smaller last batch would be traced again.
            filler = [batch[-1]] * (self._batch_size - len(batch))
            hidden = self._hidden_states(self._pad([*batch, *filler]))
            masks = [self._mask(sequence) for sequence in batch]
            places = [
                (row, token) for row, mask in enumerate(masks) for token in np.flatnonzero(mask)
            ]
            rows = tf.gather_nd(hidden, np.array(places, np.int32).reshape(-1, 2))
            ids, logits, log_z = self._top_of_rows(rows)
            ends = np.cumsum([mask.sum() for mask in masks])
            for sequence, mask, end in zip(batch, masks, ends, strict=True):
                part = slice(end - mask.sum(), end)
                yield self._record(sequence, mask, ids[part], logits[part], log_z[part], rows[part])

    def _hidden_states_of(self, features):
        with inference_context():
            return tf.cast(self._model.hidden_states(features, False), tf.float32)

    def _mask(self, sequence):
        mask = sequence.get("mask")
        length = len(sequence.get("target_ids", sequence["input_ids"]))
        return np.ones(length, bool) if mask is None else np.asarray(mask, bool)

    def _pad(self, batch):
        """One array of every feature: `[B, L]`."""
        padded = {}
        for name in batch[0]:
            values = [np.asarray(sequence[name]) for sequence in batch]
            longest = max(map(len, values))
            length = max(min(_padded_length(longest), self._max_length), longest)
            fill = self._pad_id if name in _ID_FEATURES else 0
            padded[name] = tf.constant(
                np.stack([np.pad(v, (0, length - len(v)), constant_values=fill) for v in values])
            )
        return padded

    def _top_of_rows(self, rows):
        """ids, logits `[N, K]` and log_z `[N, T]` of hidden states `[N, D]`, as arrays."""
        parts = []
        for start in range(0, len(rows), self._chunk_tokens):
            chunk = rows[start : start + self._chunk_tokens]
            missing = min(_padded_length(len(chunk)), self._chunk_tokens) - len(chunk)
            tops = self._top(tf.pad(chunk, [[0, missing], [0, 0]]))
            parts.append([top[: len(chunk)].numpy() for top in tops])
        if not parts:
            empty = np.zeros([0, self._layout.k], np.float32)
            return empty.astype(np.int32), empty, empty[:, : len(self._layout.temperatures)]
        return [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]

    def _top_of_chunk(self, chunk):
        logits = self._model.head().logits(chunk)
        kept, ids = tf.math.top_k(logits, self._layout.k)
        log_z = [tf.reduce_logsumexp(logits / t, axis=-1) for t in self._layout.temperatures]
        return ids, kept, tf.reshape(tf.stack(log_z, axis=-1), [-1, len(log_z)])

    def _record(self, sequence, mask, ids, logits, log_z, states):
        def spread(rows):
            """Rows `[R, …]` at their tokens `[L, …]`; zeros elsewhere, which are not stored."""
            whole = np.zeros([len(mask), *rows.shape[1:]], rows.dtype)
            whole[mask] = rows
            return whole

        layout = self._layout
        ids, logits = spread(ids), spread(logits)
        temperatures = [(log_z[:, n], t) for n, t in enumerate(layout.temperatures)]
        targets = [
            TopKTargets(ids, logits, spread(z), layout.vocab_size, temperature=t)
            for z, t in temperatures
        ] or TopKTargets(ids, logits, None, layout.vocab_size)
        optional = {name: sequence[name] for name in layout.fields if name != "states"}
        if "states" in layout.fields:
            optional["states"] = spread(states.numpy())
        key = sequence_key(sequence["input_ids"], sequence.get("target_ids"))
        return TeacherRecord(key, sequence["input_ids"], targets, mask, **optional)


def _padded_length(length):
    padded = _SHORTEST
    while padded < length:
        padded *= 2
    return padded
