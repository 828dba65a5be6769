"""Documents with hidden words: a random window of each, and what to predict in it. In the graph.

Axis letters: B batch, L length, W pieces of a window (L - 2), P predictions of a sequence, V
vocabulary.

Whole words are hidden, as in 2021: a share of the window's words, every piece of them. Of their
pieces 80 % become the mask, 10 % a random piece, and 10 % stay. What is drawn depends on the seed
and on the place of the document in the stream of examples only.

Source: Devlin et al., arXiv:1810.04805, section 3.1; Zaheer et al., arXiv:2007.14062, appendix E.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from bigbird.core.data import check_encoding, replace_newlines
from bigbird.core.vocabulary import SpecialTokens, Tokenizer

_MASKED, _RANDOM = 0.8, 0.9


@dataclasses.dataclass(frozen=True)
class WordMasker:
    """Makes a training example of a document.

    Attributes:
      tokenizer: the vocabulary.
      special: ids of CLS, SEP, MASK and padding.
      max_encoder_length: L.
      max_predictions_per_seq: P; words that do not fit are not hidden.
      masked_lm_prob: share of the words that is hidden.
      substitute_newline: what takes the place of every line break; None leaves them.

    Raises:
      ValueError: for values outside their ranges, or a vocabulary without these special ids.
    """

    tokenizer: Tokenizer
    special: SpecialTokens
    max_encoder_length: int
    max_predictions_per_seq: int
    masked_lm_prob: float
    substitute_newline: str | None = None

    def __post_init__(self):
        check_encoding(self.tokenizer, self.special, self.max_encoder_length)
        self.special.check(self.tokenizer.vocab_size, "mask")
        if self.max_predictions_per_seq < 1:
            raise ValueError(
                f"max_predictions_per_seq={self.max_predictions_per_seq}: expected at least 1."
            )
        if not 0.0 < self.masked_lm_prob <= 1.0:
            raise ValueError(f"masked_lm_prob={self.masked_lm_prob}: expected a share in (0, 1].")
        ids = dataclasses.asdict(self.special).values()
        random_ids = np.setdiff1d(self.tokenizer.text_ids(), list(ids))
        object.__setattr__(self, "_random_ids", random_ids.astype(np.int32))
        object.__setattr__(self, "_word_starts", self.tokenizer.word_starts())

    def __call__(self, text: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        """Makes an example of one document.

        Args:
          text: a string.
          seed: int64 `[2]`, decides the window, the words and what becomes of them.

        Returns:
          The features of 2021: `input_ids` and `segment_ids` int32 `[L]`, `masked_lm_positions` and
          `masked_lm_ids` int32 `[P]`, `masked_lm_weights` float32 `[P]`, 0 behind the predictions,
          and `next_sentence_labels` int32 `[1]`, always 0.
        """
        pieces = self.tokenizer.tokenize(replace_newlines(text, self.substitute_newline))
        window, word, length = self._window(pieces, tf.random.fold_in(seed, 0, alg="philox"))
        positions, is_prediction = self._choose(
            word, length, tf.random.fold_in(seed, 1, alg="philox")
        )
        labels = tf.where(is_prediction, tf.gather(window, positions), 0)
        shown = self._shown(labels, tf.random.fold_in(seed, 2, alg="philox"))
        window = tf.tensor_scatter_nd_update(
            window,
            tf.boolean_mask(positions, is_prediction)[:, tf.newaxis],
            tf.boolean_mask(shown, is_prediction),
        )
        return {
            "input_ids": self._sequence(window, length),
            "segment_ids": tf.zeros([self.max_encoder_length], tf.int32),
            "masked_lm_positions": tf.where(is_prediction, positions + 1, 0),
            "masked_lm_ids": labels,
            "masked_lm_weights": tf.cast(is_prediction, tf.float32),
            "next_sentence_labels": tf.zeros([1], tf.int32),
        }

    @property
    def _capacity(self) -> int:
        return self.max_encoder_length - 2

    def _window(self, pieces, seed):
        """Cuts a random window that starts with a word.

        Returns:
          `(pieces [W], index of the word of each [W], their number [])`; what is behind that number
          has no meaning.
        """
        capacity = self._capacity
        starts = tf.maximum(tf.size(pieces) - capacity, 0) + 1
        start = tf.random.stateless_uniform([], seed, 0, starts, tf.int32, alg="philox")
        window = pieces[start : start + capacity]
        length = tf.size(window)
        window = tf.pad(window, [[0, capacity - length]])
        window.set_shape([capacity])
        place = tf.range(capacity)
        is_start = tf.gather(self._word_starts, window) & (place < length)
        # Where no piece begins a word, each is one.
        is_start |= (place < length) & ~tf.reduce_any(is_start)
        first = tf.argmax(tf.cast(is_start, tf.int32), output_type=tf.int32)
        length -= first
        is_start = tf.roll(is_start, -first, axis=0) & (place < length)
        word = tf.maximum(tf.cumsum(tf.cast(is_start, tf.int32)) - 1, 0)
        return tf.roll(window, -first, axis=0), word, length

    def _choose(self, word, length, seed):
        """Draws words and returns the places of their pieces, in ascending order.

        Returns:
          `(positions int32 [P], is_prediction boolean [P])`.
        """
        capacity, most = self._capacity, self.max_predictions_per_seq
        is_piece = tf.range(capacity) < length
        num_words = tf.reduce_max(tf.where(is_piece, word, -1)) + 1
        share = tf.round(tf.cast(num_words, tf.float32) * self.masked_lm_prob)
        wanted = tf.clip_by_value(tf.cast(share, tf.int32), 1, most)
        # The words in a random order, their pieces side by side: each word draws its rank.
        rank = tf.random.stateless_uniform([capacity], seed, alg="philox")
        order = tf.argsort(tf.where(is_piece, tf.gather(rank, word), 2.0), stable=True)
        ordered = tf.gather(word, order)
        turn = tf.cumsum(tf.cast(ordered[1:] != ordered[:-1], tf.int32))
        turn = tf.concat([[0], turn], axis=0)
        chosen = (turn < wanted) & tf.gather(is_piece, order)
        if most < capacity:
            # A word that does not fit as a whole is left out; one that alone is too long, cut.
            cut = chosen[most] & (ordered == ordered[most]) & (turn > 0)
            chosen &= (tf.range(capacity) < most) & ~cut
        positions = tf.sort(tf.where(chosen, order, capacity))
        positions = tf.pad(
            positions[:most], [[0, max(most - capacity, 0)]], constant_values=capacity
        )
        is_prediction = positions < capacity
        return tf.where(is_prediction, positions, 0), is_prediction

    def _shown(self, labels, seed):
        """Returns what stands in the place of the pieces to predict: `[P]`."""
        seeds = [tf.random.fold_in(seed, i, alg="philox") for i in range(2)]
        fate = tf.random.stateless_uniform(tf.shape(labels), seeds[0], alg="philox")
        random = tf.random.stateless_uniform(
            tf.shape(labels), seeds[1], 0, len(self._random_ids), tf.int32, alg="philox"
        )
        random = tf.gather(self._random_ids, random)
        return tf.where(fate < _MASKED, self.special.mask, tf.where(fate < _RANDOM, random, labels))

    def _sequence(self, window, length):
        """`[W]` -> `[CLS] piece … piece [SEP] [PAD] …`, `[L]`."""
        place = tf.range(self._capacity + 1)
        behind = tf.where(place == length, self.special.sep, self.special.pad)
        ids = tf.where(place < length, tf.pad(window, [[0, 1]]), behind)
        return tf.concat([[self.special.cls], ids], axis=0)
