"""The loss of summaries: cross entropy with label smoothing, of the target tokens alone.

Axis letters: B batch, T target length, V vocabulary.
"""

from __future__ import annotations

import math

import tensorflow as tf

PAD = 0


def padded_cross_entropy_loss(logits, labels, smoothing, vocab_size):
    """Mean cross entropy with label smoothing over the target tokens.

        loss = sum_i m_i (H(q_i, p_i) - H(q_i)) / sum_i m_i          m_i = [label_i is not padding]

    where p is the softmax of the logits, and q is 1 - smoothing on the label and
    smoothing / (V - 1) elsewhere. H(q) is the smallest value the cross entropy can take: a perfect
    model has loss 0. Without any target token the loss is 0.

    The 2021 function left m_i out of the numerator, so that padding counted; see
    docs/differences.md.

    Args:
      logits: `[B, T, V]`.
      labels: int `[B, T]`; 0 is padding.
      smoothing: share of q outside the label, in [0, 1).
      vocab_size: V.

    Returns:
      float32 `[]`, nats per target token.

    Raises:
      ValueError: if V is not the logits' last size, or `smoothing` is outside its range.

    Source: Szegedy et al. 2016, section 7; Vaswani et al. 2017, section 5.4.
    """
    if logits.shape[-1] != vocab_size:
        raise ValueError(
            f"Expected logits [B, T, {vocab_size}], as vocab_size={vocab_size}; received "
            f"{logits.shape}."
        )
    is_target = tf.cast(tf.not_equal(labels, PAD), tf.float32)
    loss, _ = smoothed_cross_entropy(logits, labels, smoothing)
    return tf.math.divide_no_nan(tf.reduce_sum(loss * is_target), tf.reduce_sum(is_target))


def smoothed_cross_entropy(logits, labels, smoothing):
    """The cross entropy of every position, with and without label smoothing.

        H(q, p) = -(1 - smoothing - low) log p[label] - low sum_v log p[v]
        log p[v] = z[v] - log sum_u exp z[u],        low = smoothing / (V - 1)

    q is never made: it would be as large as the logits.

    Args:
      logits: z, `[..., V]`.
      labels: int `[...]`.
      smoothing: as for `padded_cross_entropy_loss`.

    Returns:
      `(H(q, p) - H(q), -log p[label])`, float32 `[...]`.
    """
    check_smoothing(smoothing)
    logits = tf.cast(logits, tf.float32)
    log_z = tf.reduce_logsumexp(logits, axis=-1)
    picked = tf.gather(logits, labels, axis=-1, batch_dims=labels.shape.rank)
    cross_entropy = log_z - picked
    if smoothing == 0:
        return cross_entropy, cross_entropy
    vocab_size = logits.shape[-1]
    low = smoothing / (vocab_size - 1)
    entropy = -(1 - smoothing) * math.log(1 - smoothing) - smoothing * math.log(low)
    sum_of_log_p = vocab_size * (tf.reduce_mean(logits, axis=-1) - log_z)
    loss = (1 - smoothing - low) * cross_entropy - low * sum_of_log_p - entropy
    return loss, cross_entropy


def check_smoothing(smoothing: float) -> None:
    """Checks the range of the share of label smoothing.

    Raises:
      ValueError: outside [0, 1).
    """
    if not 0 <= smoothing < 1:
        raise ValueError(
            f"label_smoothing={smoothing}: expected a share in [0, 1); change --label_smoothing."
        )
