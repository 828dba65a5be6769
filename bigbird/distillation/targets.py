"""What a student is told of its teacher: the K largest logits of every token and their normaliser.

Axis letters: B batch, L length, V vocabulary, K kept. Leading axes are free: `[...]` is one token
each, `[B, L]` in a batch.
"""

import math
import typing

import tensorflow as tf

# A kept mass of 1 comes out a little above it when logits are stored in 16 bits.
LOG_MASS_TOLERANCE = 0.1


class TopKTargets(tf.experimental.BatchableExtensionType):
    r"""The teacher's K largest logits a_k of each token and its log-normaliser.

    With T the `temperature`, A_T = log Σ_{v in V} exp(a_v / T) is stored next to the raw logits, so
    that the probabilities p_k = exp(a_k / T - A_T), the kept mass M = Σ_k p_k and the missing mass
    1 - M are those of the whole vocabulary. A_T cannot be had from another temperature's
    normaliser and K logits.

    Works as an argument of `tf.function`, compiled or not, and as an element of `tf.data`.

    Attributes:
      ids: int32 `[..., K]`, vocabulary ids. An id may be repeated where the entries are samples;
        its mass is then the sum of theirs.
      logits: float `[..., K]`, raw (neither normalised nor divided by T), descending. Entries of
        -inf are absent.
      log_z: float32 `[...]`, A_T in nats, or None where it was not recorded; then only the share of
        each kept id in the kept mass is known.
      count: int32 `[...]`, how many entries are valid, or None where all K are. What lies behind
        them is never read.
      vocab_size: V of the teacher, padding included.
      temperature: T at which `log_z` was taken.

    Source: "Efficient Knowledge Distillation for LLMs", arXiv:2608.03796, offline top-K logits.
    """

    ids: tf.Tensor
    logits: tf.Tensor
    log_z: typing.Optional[tf.Tensor]  # noqa: UP045 (extension types know no `X | None`)
    count: typing.Optional[tf.Tensor]  # noqa: UP045
    vocab_size: int
    temperature: float

    def __init__(self, ids, logits, log_z, vocab_size, count=None, temperature=1.0):
        """Checks shapes and ranges that need no values; see the class for the arguments.

        Raises:
          ValueError: shapes that do not belong together, or a temperature or vocabulary size that
            is not positive.
        """
        self.ids = tf.cast(tf.convert_to_tensor(ids), tf.int32)
        self.logits = tf.convert_to_tensor(logits)
        self.log_z = None if log_z is None else tf.cast(tf.convert_to_tensor(log_z), tf.float32)
        self.count = None if count is None else tf.cast(tf.convert_to_tensor(count), tf.int32)
        self.vocab_size = int(vocab_size)
        self.temperature = float(temperature)
        if not self.logits.dtype.is_floating:
            raise ValueError(f"logits must be floating point; received {self.logits.dtype.name}.")
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1; received {vocab_size}.")
        require_positive("temperature", self.temperature)
        require_shape("logits", self.logits, self.ids.shape, "that of ids")
        for name, rows in (("log_z", self.log_z), ("count", self.count)):
            if rows is not None:
                require_shape(name, rows, self.ids.shape[:-1], "that of ids without its last axis")

    @classmethod
    def from_logits(cls, logits, k=100, temperature=1.0):
        """Keeps the k largest of a teacher's logits `[..., V]`, with the normaliser of them all.

        Raises:
          ValueError: k outside [1, V].
        """
        logits = tf.convert_to_tensor(logits)
        vocab_size = logits.shape[-1]
        if not 1 <= k <= vocab_size:
            raise ValueError(f"k must be between 1 and the vocabulary size {vocab_size}; got {k}.")
        log_z = tf.reduce_logsumexp(tf.cast(logits, tf.float32) / temperature, axis=-1)
        kept, ids = tf.math.top_k(logits, k)
        return cls(ids, kept, log_z, vocab_size, temperature=temperature)

    @property
    def kept(self):
        """K, the number of entries of a row."""
        return self.ids.shape[-1]

    @property
    def present(self):
        """Which entries are valid and not -inf: bool `[..., K]`."""
        return self._counted() & ~tf.equal(self.logits, -math.inf)

    def carries_mass_at(self, temperature):
        """Whether the kept and the missing mass at this temperature are known."""
        return self.log_z is not None and self.temperature == temperature

    def flatten(self):
        """The targets with one token axis: ids and logits `[N, K]`."""
        rank = self.ids.shape.rank
        return self._map(lambda rows: tf.reshape(rows, [-1, *rows.shape[rank - 1 :]]))

    def take(self, start, size):
        """The rows start ... start + size - 1 of the first axis."""
        return self._map(lambda rows: take_rows(rows, start, size))

    def log_mass(self):
        """log M, the logarithm of the teacher's mass on the kept ids: float32 `[...]`.

        Raises:
          ValueError: the normaliser was not recorded.
        """
        if self.log_z is None:
            raise ValueError(
                "The kept mass needs the teacher's log-normaliser, and these targets have "
                'log_z=None. Record log_z, or train with tail="renormalize", which needs no mass.'
            )
        return self._log_kept(self.present) - self.log_z

    def dropped_mass(self, vocab_size):
        """The teacher's mass on kept ids of `vocab_size` and above: float32 `[...]`.

        Without `log_z` it is their share in the kept mass instead.
        """
        present = self.present
        if vocab_size >= self.vocab_size:
            return tf.zeros_like(present[..., 0], tf.float32)
        log_z = self._log_kept(present) if self.log_z is None else self.log_z
        log_dropped = self._log_kept(present & (self.ids >= vocab_size))
        return tf.where(tf.math.is_finite(log_dropped), tf.exp(log_dropped - log_z), 0.0)

    def restrict(self, vocab_size):
        """The same targets for a smaller vocabulary: ids of `vocab_size` and above are absent.

        The normaliser stays the teacher's, so the mass that went counts as missing.
        """
        if vocab_size >= self.vocab_size:
            return self
        inside = self.present & (self.ids < vocab_size)
        logits = tf.where(inside, self.logits, tf.cast(-math.inf, self.logits.dtype))
        order = tf.argsort(logits, direction="DESCENDING", stable=True)
        return TopKTargets(
            tf.gather(self.ids, order, batch_dims=order.shape.rank - 1),
            tf.gather(logits, order, batch_dims=order.shape.rank - 1),
            self.log_z,
            vocab_size,
            tf.reduce_sum(tf.cast(inside, tf.int32), axis=-1),
            self.temperature,
        )

    def cast(self, dtype):
        """The targets with logits rounded to `dtype` and the kept mass unchanged.

        Rounding moves the kept logits but not the teacher's tail, so an unchanged normaliser would
        put the error of the largest logits into the small missing mass. `log_z` moves with them.
        """
        logits = tf.cast(self.logits, dtype)
        rounded = TopKTargets(
            self.ids, logits, self.log_z, self.vocab_size, self.count, self.temperature
        )
        if self.log_z is None:
            return rounded
        present = self.present
        shift = rounded._log_kept(present) - self._log_kept(present)
        log_z = self.log_z + tf.where(tf.math.is_finite(shift), shift, 0.0)
        return TopKTargets(self.ids, logits, log_z, self.vocab_size, self.count, self.temperature)

    def faults(self, unique_ids=False):
        """What is wrong with each token's row: a dict from an explanation to bool `[...]`.

        Args:
          unique_ids: whether an id named twice is a fault.
        """
        counted, present = self._counted(), self.present
        unknown = (self.ids < 0) | (self.ids >= self.vocab_size)
        rising = self.logits[..., 1:] > self.logits[..., :-1]
        faults = {
            f"ids outside the vocabulary: expected 0 <= id < {self.vocab_size}. Mark what is "
            "absent with count or a logit of -inf.": tf.reduce_any(present & unknown, axis=-1),
            "logits that are NaN or +inf: expected finite ones, or -inf for what is "
            "absent.": tf.reduce_any(counted & ~(self.logits < math.inf), axis=-1),
            "logits out of order: expected them descending, as tf.math.top_k gives "
            "them.": tf.reduce_any(counted[..., 1:] & rising, axis=-1),
        }
        if self.count is not None:
            outside = (self.count < 0) | (self.count > self.kept)
            faults[f"count outside 0 ... {self.kept}, the number of entries."] = outside
        if self.log_z is not None:
            faults["log_z that is NaN or infinite."] = ~tf.math.is_finite(self.log_z)
            faults[
                "a kept mass above 1: expected log_z of at least logsumexp(logits / "
                f"{self.temperature:g}). Was it taken at another temperature?"
            ] = self.log_mass() > LOG_MASS_TOLERANCE
        if unique_ids:
            # What is absent gets a stand-in below 0, each its own.
            ids = tf.sort(tf.where(present, self.ids, -1 - tf.range(self.kept)), axis=-1)
            faults["ids named twice: expected each once under this tail rule."] = tf.reduce_any(
                tf.equal(ids[..., 1:], ids[..., :-1]), axis=-1
            )
        return faults

    def _map(self, function):
        return TopKTargets(
            function(self.ids),
            function(self.logits),
            None if self.log_z is None else function(self.log_z),
            self.vocab_size,
            None if self.count is None else function(self.count),
            self.temperature,
        )

    def _counted(self):
        """Which entries lie before `count`: bool `[..., K]`."""
        if self.count is None:
            return tf.ones_like(self.ids, tf.bool)
        return tf.range(self.kept) < self.count[..., tf.newaxis]

    def _log_kept(self, chosen):
        """log Σ exp(a_k / T) over the `chosen` entries: float32 `[...]`, -inf where none is."""
        logits = tf.cast(self.logits, tf.float32) / self.temperature
        return tf.reduce_logsumexp(tf.where(chosen, logits, -math.inf), axis=-1)


class TeacherLogits(tf.experimental.BatchableExtensionType):
    """A teacher's logits over its whole vocabulary, with the methods of `TopKTargets`.

    Attributes:
      logits: float `[..., V]`, raw.
    """

    logits: tf.Tensor

    def __init__(self, logits):
        self.logits = tf.stop_gradient(tf.convert_to_tensor(logits))
        if self.logits.shape.rank is None or self.logits.shape[-1] is None:
            raise ValueError(
                f"Teacher logits must be [..., V] of known V; received {self.logits.shape}."
            )

    @property
    def vocab_size(self):
        """V of the teacher."""
        return self.logits.shape[-1]

    def carries_mass_at(self, temperature):
        """As `TopKTargets.carries_mass_at`."""
        del temperature
        return True

    def flatten(self):
        """As `TopKTargets.flatten`."""
        return TeacherLogits(tf.reshape(self.logits, [-1, self.vocab_size]))

    def take(self, start, size):
        """As `TopKTargets.take`."""
        return TeacherLogits(take_rows(self.logits, start, size))

    def restrict(self, vocab_size):
        """As `TopKTargets.restrict`."""
        return TeacherLogits(self.logits[..., :vocab_size])

    def dropped_mass(self, vocab_size):
        """As `TopKTargets.dropped_mass`, at temperature 1."""
        if vocab_size >= self.vocab_size:
            return tf.zeros_like(self.logits[..., 0], tf.float32)
        mass = tf.nn.softmax(tf.cast(self.logits, tf.float32))
        return tf.reduce_sum(mass[..., vocab_size:], axis=-1)

    def faults(self, unique_ids=False):
        """As `TopKTargets.faults`."""
        del unique_ids
        return {
            "teacher logits that are NaN or +inf: expected finite numbers, or -inf for a token "
            "the teacher rules out.": tf.reduce_any(~(self.logits < math.inf), axis=-1)
        }


def take_rows(tensor, start, size):
    """Rows start ... start + size - 1 of the first axis; `start` and `size` may be tensors."""
    others = tensor.shape[1:]
    return tf.slice(tensor, [start] + [0] * len(others), [size, *others])


def require_choice(name, value, choices):
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; received {value!r}.")


def require_positive(name, value):
    """Raises ValueError unless `value` is a finite number above 0."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a finite number above 0; received {value}.")


def require_shape(name, tensor, expected, meaning):
    """Raises ValueError unless the static shape of `tensor` can be `expected`."""
    if not tensor.shape.is_compatible_with(expected):
        raise ValueError(
            f"{name} must have the shape {tf.TensorShape(expected)}, {meaning}; received "
            f"{tensor.shape}."
        )
