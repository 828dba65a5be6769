r"""Divergence of rows of student logits from teacher rows, and its gradient in those logits.

Axis letters: C tokens of a chunk, V vocabulary, K kept.

At temperature T the student has u = z / T, L = log Σ_v exp(u_v), q = exp(u - L). The teacher's
kept probabilities are p_k, their mass M = Σ_k p_k, what is missing R = 1 - M. With L_out the
logarithm of Σ exp(u_v) over the ids outside, those not kept:

| tail          | divergence of a row                           | gradient ∂/∂u_v                  |
| ------------- | --------------------------------------------- | -------------------------------- |
| `renormalize` | Σ w log w - Σ w (u - L), w = p / M            | q - w                            |
| `zero`        | Σ p log p - Σ p (u - L)                       | M q - p                          |
| `bucket`      | that + R (log R - L_out + L)                  | q - p; outside q-R exp(u-L_out)  |
| `uniform`     | that + R log π - π Σ_out (u - L), π = R/(V-K) | q - p; outside q - π             |

A weight of 0 contributes 0 whatever the logits. Nothing is clamped: `zero` compares masses M and 1
and may be negative; the others are divergences of distributions.
"""

import math
from typing import NamedTuple

import tensorflow as tf

TAILS = ("renormalize", "zero", "bucket", "uniform")
# Rules that tell ids inside from ids outside; an id named twice would be counted twice there.
TAILS_WITH_OUTSIDE = ("bucket", "uniform")


class TopKRows(NamedTuple):
    """Top-K teacher rows under a tail rule.

    Attributes:
      tail: the rule.
      ids: int32 `[C, K]`, 0 where absent.
      present: bool `[C, K]`.
      weights: float32 `[C, K]`, w_k, 0 where absent.
      mass: float32 `[C]`, M, or None where the targets do not carry it.
      missing: float32 `[C]`, R, 0 for a row with nothing present or nothing outside, or None.
      vocab_size: V.
    """

    tail: str
    ids: tf.Tensor
    present: tf.Tensor
    weights: tf.Tensor
    mass: tf.Tensor | None
    missing: tf.Tensor | None
    vocab_size: int

    @classmethod
    def of(cls, targets, active, *, temperature, tail, vocab_size):
        """Rows of `targets` `[C, K]`; a row that is not `active` has nothing present."""
        logits = tf.cast(targets.logits, tf.float32) / temperature
        known = (targets.ids >= 0) & (targets.ids < vocab_size)
        present = targets.present & known & active[:, tf.newaxis]
        log_kept = tf.reduce_logsumexp(tf.where(present, logits, -math.inf), axis=-1)
        mass = missing = None
        if targets.carries_mass_at(temperature):
            log_mass = log_kept - targets.log_z
            mass = tf.exp(log_mass)
            count = tf.reduce_sum(tf.cast(present, tf.int32), axis=-1)
            has_outside = (count > 0) & (count < vocab_size) & (log_mass < 0.0)
            missing = tf.where(has_outside, -tf.math.expm1(log_mass), 0.0)
        log_total = log_kept if tail == "renormalize" else targets.log_z
        weights = tf.where(present, tf.exp(logits - log_total[:, tf.newaxis]), 0.0)
        return cls(
            tail, tf.where(present, targets.ids, 0), present, weights, mass, missing, vocab_size
        )

    def normalizers(self, softened):
        """What the divergence and its gradient need of a row `[C, V]` of u: a dict of `[C]`."""
        normalizers = {"log_norm": tf.reduce_logsumexp(softened, axis=-1)}
        if self.tail == "bucket":
            normalizers["log_outside"] = self._log_outside(softened)
        return normalizers

    def divergence(self, softened, normalizers):
        """The divergence of each row: float32 `[C]`."""
        log_norm = normalizers["log_norm"]
        log_student = tf.gather(softened, self.ids, batch_dims=1) - log_norm[:, tf.newaxis]
        # The weights of an id named twice are one probability, and its logarithm is of their sum.
        merged = _sum_by_id(self.ids, self.weights)
        divergence = tf.reduce_sum(
            tf.math.xlogy(merged, merged) - tf.math.multiply_no_nan(log_student, self.weights),
            axis=-1,
        )
        if self.tail == "bucket":
            log_outside = normalizers["log_outside"] - log_norm
            divergence += _times(self.missing, tf.math.log(self.missing) - log_outside)
        if self.tail == "uniform":
            share = self._outside_share()
            log_students = tf.where(self.outside(), softened - log_norm[:, tf.newaxis], 0.0)
            divergence += _times(self.missing, tf.math.log(share))
            divergence -= _times(share, tf.reduce_sum(log_students, axis=-1))
        return divergence

    def gradient(self, softened, normalizers, upstream):
        """upstream · ∂ divergence / ∂u: float32 `[C, V]`, for `upstream` `[C]`."""
        total = tf.reduce_sum(self.weights, axis=-1)
        if self.tail in TAILS_WITH_OUTSIDE:
            total += self.missing
        student = tf.exp(softened - normalizers["log_norm"][:, tf.newaxis])
        gradient = (upstream * total)[:, tf.newaxis] * student
        if self.tail == "bucket":
            within_outside = tf.exp(softened - normalizers["log_outside"][:, tf.newaxis])
            pull = (upstream * self.missing)[:, tf.newaxis] * within_outside
            gradient -= tf.where(self.outside(), pull, 0.0)
        if self.tail == "uniform":
            pull = (upstream * self._outside_share())[:, tf.newaxis]
            gradient -= tf.where(self.outside(), pull, 0.0)
        return subtract_at(gradient, self.ids, upstream[:, tf.newaxis] * self.weights)

    def textbook(self, softened):
        """The divergence written out over `[C, V]`, for TensorFlow to differentiate."""
        log_student = tf.nn.log_softmax(softened)
        teacher = tf.scatter_nd(_cells(self.ids), self.weights, self._shape())
        if self.tail == "uniform":
            teacher += tf.where(self.outside(), self._outside_share()[:, tf.newaxis], 0.0)
        divergence = _relative_entropy(teacher, log_student)
        if self.tail == "bucket":
            # A row without a tail gets a finite stand-in, for its gradient is multiplied by 0.
            has_tail = self.missing > 0.0
            outside = self.outside() | ~has_tail[:, tf.newaxis]
            log_outside = tf.reduce_logsumexp(tf.where(outside, log_student, -math.inf), axis=-1)
            missing = tf.where(has_tail, self.missing, 1.0)
            divergence += tf.where(has_tail, missing * (tf.math.log(missing) - log_outside), 0.0)
        return divergence

    def diagnostics(self, softened, normalizers):
        """What a trainer may log of each row: a dict of float32 `[C]`."""
        log_norm = normalizers["log_norm"]
        log_outside = self._log_outside(softened) - log_norm
        first = self.ids[:, 0]
        agrees = tf.equal(tf.argmax(softened, axis=-1, output_type=tf.int32), first)
        diagnostics = {
            "student_kept_mass": -tf.math.expm1(log_outside),
            "argmax_agreement": tf.cast(agrees & self.present[:, 0], tf.float32),
        }
        if self.mass is not None:
            tail_kl = _times(self.missing, tf.math.log(self.missing) - log_outside)
            diagnostics |= {"kept_mass": self.mass, "tail_kl": tail_kl}
        return diagnostics

    def outside(self):
        """Which ids are not present in their row: bool `[C, V]`."""
        present = tf.cast(self.present, tf.int8)
        return tf.equal(tf.scatter_nd(_cells(self.ids), present, self._shape()), 0)

    def _log_outside(self, softened):
        return tf.reduce_logsumexp(tf.where(self.outside(), softened, -math.inf), axis=-1)

    def _outside_share(self):
        """π, the mass of each id outside: float32 `[C]`."""
        count = tf.reduce_sum(tf.cast(self.present, tf.float32), axis=-1)
        return tf.math.divide_no_nan(self.missing, self.vocab_size - count)

    def _shape(self):
        return tf.stack([tf.shape(self.ids)[0], self.vocab_size])


class WholeRows(NamedTuple):
    """Rows of a teacher's whole distribution.

    Attributes:
      log_teacher: float32 `[C, V]`, log p.
    """

    log_teacher: tf.Tensor

    @classmethod
    def of(cls, targets, active, *, temperature, tail, vocab_size):
        """Rows of `TeacherLogits` `[C, V]`; a row that is not `active` is not read."""
        del tail, vocab_size
        logits = tf.cast(targets.logits, tf.float32) / temperature
        return cls(tf.nn.log_softmax(tf.where(active[:, tf.newaxis], logits, 0.0)))

    def normalizers(self, softened):
        """As `TopKRows.normalizers`."""
        return {"log_norm": tf.reduce_logsumexp(softened, axis=-1)}

    def divergence(self, softened, normalizers):
        """As `TopKRows.divergence`."""
        log_student = softened - normalizers["log_norm"][:, tf.newaxis]
        teacher = tf.exp(self.log_teacher)
        return tf.reduce_sum(
            tf.math.multiply_no_nan(self.log_teacher - log_student, teacher), axis=-1
        )

    def gradient(self, softened, normalizers, upstream):
        """As `TopKRows.gradient`."""
        student = tf.exp(softened - normalizers["log_norm"][:, tf.newaxis])
        return upstream[:, tf.newaxis] * (student - tf.exp(self.log_teacher))

    def textbook(self, softened):
        """As `TopKRows.textbook`."""
        return _relative_entropy(tf.exp(self.log_teacher), tf.nn.log_softmax(softened))

    def diagnostics(self, softened, normalizers):
        """As `TopKRows.diagnostics`."""
        del normalizers
        agrees = tf.equal(tf.argmax(softened, axis=-1), tf.argmax(self.log_teacher, axis=-1))
        whole = tf.ones_like(self.log_teacher[:, 0])
        return {
            "argmax_agreement": tf.cast(agrees, tf.float32),
            "student_kept_mass": whole,
            "kept_mass": whole,
            "tail_kl": tf.zeros_like(whole),
        }


def subtract_at(rows, ids, values):
    """`rows` `[C, V]` less `values` `[C, K]` at `ids` `[C, K]`, as often as an id is named."""
    return tf.tensor_scatter_nd_sub(rows, _cells(ids), values)


def _cells(ids):
    """Indices of the cells of `[C, V]` that `ids` `[C, K]` name: int32 `[C, K, 2]`."""
    rows = tf.broadcast_to(tf.range(tf.shape(ids)[0])[:, tf.newaxis], tf.shape(ids))
    return tf.stack([rows, ids], axis=-1)


def _sum_by_id(ids, values):
    """Sums of `values` `[C, K]` over equal ids of a row: `[C, K]`, one place an id, the rest 0."""
    order = tf.argsort(ids, axis=-1)
    ids = tf.gather(ids, order, batch_dims=1)
    is_new = tf.cast(tf.not_equal(ids[:, 1:], ids[:, :-1]), tf.int32)
    place = tf.cumsum(tf.pad(is_new, [[0, 0], [1, 0]]), axis=-1)
    return tf.tensor_scatter_nd_add(
        tf.zeros_like(values), _cells(place), tf.gather(values, order, batch_dims=1)
    )


def _relative_entropy(teacher, log_student):
    """Σ_v p_v (log p_v - log q_v) over the last axis, with 0 where p_v is 0."""
    return tf.reduce_sum(
        tf.math.xlogy(teacher, teacher) - tf.math.multiply_no_nan(log_student, teacher), axis=-1
    )


def _times(mass, logarithm):
    """mass · logarithm, 0 where the mass is 0 whatever the logarithm."""
    return tf.math.multiply_no_nan(logarithm, mass)
