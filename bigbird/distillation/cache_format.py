"""One sequence of a teacher cache as bytes: integers packed to bits, logits in 16 bits, and back.

Axis letters: L tokens of a sequence, R rows (tokens that take part), K kept, T temperatures.

A record is a `tf.train.Example` of raw byte arrays, which plain `tf.data` reads:

    tf.data.TFRecordDataset(cache.files).map(cache.format.decode)

What is stored of a token's logits is their distance to the largest, a_k - a_1, and that of the
normaliser, A_T - a_1 / T. No divergence sees the difference, and 16 bits resolve small numbers
best: the likeliest ids are stored the most precisely.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from bigbird.distillation.targets import TopKTargets, require_choice, require_positive

LOGITS_DTYPES = ("bfloat16", "float32")
# What a token's row tells of: that token (masked, sequence to sequence models) or the next one.
ALIGNMENTS = ("same", "next")
# What a record may hold besides `input_ids`, `mask` and targets.
OPTIONAL_FIELDS = ("target_ids", "document_ids", "labels", "states")
_ROW_FIELDS = ("ids", "logits", "count", "log_z", "labels", "states")

# Bits of an integer that is stored as int32, and of a mask that is stored as uint8.
_WORD, _BYTE = 32, 8
# Eight values of b bits fill b bytes, and each lies within five of them.
_GROUP = 8


@dataclasses.dataclass(frozen=True)
class TeacherRecord:
    """What a teacher says of one sequence.

    Attributes:
      key: names the sequence; see `sequence_key`.
      input_ids: int `[L]`; what the model reads.
      targets: `TopKTargets` of `[L, K]`, or one for each temperature, alike but for `log_z`.
      mask: bool `[L]`, the tokens that take part; only their rows are stored. None: all.
      target_ids: int `[L]`, of a sequence to sequence model. L is then the length of these, and
        `input_ids` has its own.
      document_ids: int, as long as `input_ids`: which document of a packed sequence a token is of.
      labels: int `[L]`, hard labels; negative where there is none.
      states: float `[L, D]`, the teacher's hidden states.
    """

    key: str
    input_ids: Any
    targets: TopKTargets | Sequence[TopKTargets]
    mask: Any = None
    target_ids: Any = None
    document_ids: Any = None
    labels: Any = None
    states: Any = None

    @property
    def length(self) -> int:
        """L, the number of tokens that may have a row."""
        return len(self.input_ids if self.target_ids is None else self.target_ids)


def sequence_key(input_ids, target_ids=None) -> str:
    """Names a sequence by its content: 32 hexadecimal digits, the same in every process.

    Args:
      input_ids: int `[L]` without padding behind.
      target_ids: int, likewise, where the model reads them too.
    """
    digest = hashlib.sha256()
    for ids in (input_ids, () if target_ids is None else target_ids):
        ids = np.asarray(ids, "<i4")
        digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
    return digest.hexdigest()[:32]


@dataclasses.dataclass(frozen=True)
class RecordFormat:
    """How the records of a cache are laid out.

    Attributes:
      vocab_size: V of the teacher's head; all ids are below it.
      k: K, entries of a row.
      temperatures: those at which the normaliser is stored; may be empty.
      compact: whether integers take as many bits as they need, not 32.
      logits_dtype: `bfloat16` or `float32`.
      fields: which `OPTIONAL_FIELDS` there are.
      state_width: D of `states`, or None.

    Raises:
      ValueError: for a value outside its range.
    """

    vocab_size: int
    k: int
    temperatures: tuple[float, ...] = (1.0,)
    compact: bool = False
    logits_dtype: str = "bfloat16"
    fields: tuple[str, ...] = ()
    state_width: int | None = None

    def __post_init__(self):
        if not 1 <= self.k <= self.vocab_size:
            raise ValueError(
                f"k must be between 1 and the vocabulary size {self.vocab_size}; got {self.k}."
            )
        for temperature in self.temperatures:
            require_positive("temperature", temperature)
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(f"temperatures must differ; received {self.temperatures}.")
        require_choice("logits_dtype", self.logits_dtype, LOGITS_DTYPES)
        for field in self.fields:
            require_choice("field", field, OPTIONAL_FIELDS)
        if ("states" in self.fields) != (self.state_width is not None):
            raise ValueError(
                f"state_width belongs to the field states; received fields={self.fields} and "
                f"state_width={self.state_width}."
            )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RecordFormat:
        """Returns the format that `to_json` described; other keys are left out."""
        names = [field.name for field in dataclasses.fields(cls)]
        lists = ("temperatures", "fields")
        return cls(**{n: tuple(values[n]) if n in lists else values[n] for n in names})

    def to_json(self) -> dict[str, Any]:
        """Returns the attributes as JSON values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}

    # ------------------------------------------------------------------------ writing

    def encode(self, record: TeacherRecord) -> bytes:
        """Returns the record as bytes, the same in every process.

        Raises:
          ValueError: for shapes that do not fit, or faulty values in a row that takes part.
        """
        try:
            arrays = self._arrays(record)
        except ValueError as error:
            raise ValueError(f"Sequence {record.key}: {error}") from error
        features = {"key": _bytes(record.key.encode())}
        for name, array in arrays.items():
            features[name] = _bytes(self._packed(name, array))
        # Packed bits do not tell how many values there were.
        lengths = [len(arrays["input_ids"]), record.length, len(arrays["ids"])]
        features["lengths"] = tf.train.Feature(int64_list=tf.train.Int64List(value=lengths))
        example = tf.train.Example(features=tf.train.Features(feature=features))
        return example.SerializeToString(deterministic=True)

    def _arrays(self, record):
        """The record's arrays by name; rows only where the mask is True."""
        length = record.length
        mask = np.ones(length, bool) if record.mask is None else np.asarray(record.mask, bool)
        arrays = {"input_ids": np.asarray(record.input_ids), "mask": mask}
        shapes = {"input_ids": arrays["input_ids"].shape[:1], "mask": (length,)}
        for name in OPTIONAL_FIELDS:
            value = getattr(record, name)
            if (value is None) != (name not in self.fields):
                raise ValueError(
                    f"expected {name} in every record or in none: the cache has the fields "
                    f"{self.fields}, and this record has {name} {'not ' * (value is None)}set."
                )
            if value is not None:
                arrays[name] = np.asarray(value)
                shapes[name] = (length,)
        if "document_ids" in arrays:
            shapes["document_ids"] = shapes["input_ids"]
        if "states" in arrays:
            shapes["states"] = (length, self.state_width)
        for name, shape in shapes.items():
            if arrays[name].shape != shape:
                raise ValueError(
                    f"expected {name} of shape {shape}; received {arrays[name].shape}."
                )
        for name in ("input_ids", "target_ids", "labels"):
            self._check_ids(name, arrays.get(name))
        arrays |= self._target_arrays(record.targets, length, mask)
        return {n: a[mask] if n in _ROW_FIELDS else a for n, a in arrays.items()}

    def _check_ids(self, name, ids):
        if ids is None or len(ids) == 0:
            return
        smallest = -1 if name == "labels" else 0
        if name == "labels":
            ids = np.maximum(ids, -1)
        if ids.min() < smallest or ids.max() >= self.vocab_size:
            raise ValueError(
                f"expected {name} from {smallest} to {self.vocab_size - 1}; received "
                f"{ids.min()} to {ids.max()}."
            )

    def _target_arrays(self, targets, length, mask):
        """Rows `[L, …]`: distances to the largest logit, absent entries all alike."""
        targets = [targets] if isinstance(targets, TopKTargets) else list(targets)
        self._check_targets(targets, length, mask)
        first = targets[0]
        present = first.present.numpy()
        top = np.where(present[:, 0], first.logits.numpy()[:, 0].astype(np.float32), 0.0)
        logits = first.logits.numpy().astype(np.float32) - top[:, np.newaxis]
        logits = np.where(present, logits, -np.inf)
        ids = np.where(present, first.ids.numpy(), 0)
        log_z = np.zeros([length, len(self.temperatures)], np.float32)
        for place, temperature in enumerate(self.temperatures):
            moved = TopKTargets(
                ids,
                logits,
                targets[place].log_z - top / np.float32(temperature),
                self.vocab_size,
                temperature=temperature,
            )
            log_z[:, place] = moved.cast(self.logits_dtype).log_z
        width = [(0, 0), (0, self.k - first.kept)]
        logits = np.pad(np.where(present, logits, 0.0), width)
        return {
            "ids": np.pad(ids, width),
            "logits": tf.cast(logits, self.logits_dtype).numpy(),
            "count": present.sum(axis=1),
            "log_z": log_z,
        }

    def _check_targets(self, targets, length, mask):
        known = [t.temperature for t in targets if t.log_z is not None]
        if tuple(known) != self.temperatures or len(targets) != max(len(known), 1):
            raise ValueError(
                f"expected targets with log_z at the temperatures {self.temperatures}, one each; "
                f"received {tuple(known)}."
            )
        for target in targets:
            if target.vocab_size != self.vocab_size or target.kept > self.k:
                raise ValueError(
                    f"expected targets of vocab_size={self.vocab_size} with at most {self.k} "
                    f"entries a token; received {target.vocab_size} and {target.kept}."
                )
            if target.ids.shape[0] != length or target.ids.shape.rank != 2:
                raise ValueError(
                    f"expected targets of {length} tokens, one row each; received ids of shape "
                    f"{target.ids.shape}."
                )
            for explanation, rows in target.faults().items():
                faulty = np.flatnonzero(rows.numpy() & mask)
                if len(faulty):
                    raise ValueError(f"token {faulty[0]} has {explanation}")

    def _packed(self, name, array):
        if name == "states":
            return tf.cast(array, self.logits_dtype).numpy().tobytes()
        if name in ("logits", "log_z"):
            return array.tobytes()
        if name == "labels":
            array = np.maximum(array, -1) + 1
        return pack_bits(array, self._bits(name))

    def _bits(self, name):
        """Bits of each integer of a field."""
        if not self.compact:
            return _BYTE if name == "mask" else _WORD
        largest = {"mask": 1, "count": self.k, "labels": self.vocab_size, "document_ids": 2**16 - 1}
        return max(largest.get(name, self.vocab_size - 1).bit_length(), 1)

    # ------------------------------------------------------------------------ reading

    def decode(self, serialized) -> dict[str, tf.Tensor]:
        """Decodes a record, in TensorFlow operations.

        Args:
          serialized: scalar string.

        Returns:
          A dict of `key` and `input_ids`, int32 `[L]`; `mask`, bool `[L]`; `ids`, int32 `[L, K]`,
          `logits` `[L, K]`, `count`, int32 `[L]`, and `log_z`, float32 `[L, T]`: 0 where the mask
          is False; and the optional fields. L is the length of `target_ids` where there are any.
        """
        names = ["key", "input_ids", "mask", "ids", "logits", "count", "log_z", *self.fields]
        spec = {name: tf.io.FixedLenFeature([], tf.string) for name in names}
        spec["lengths"] = tf.io.FixedLenFeature([3], tf.int64)
        raw = tf.io.parse_single_example(serialized, spec)
        input_length, length, rows = tf.unstack(tf.cast(raw["lengths"], tf.int32))
        read = {
            "input_ids": self._integers(raw, "input_ids", input_length),
            "mask": tf.cast(self._integers(raw, "mask", length), tf.bool),
            "ids": tf.reshape(self._integers(raw, "ids", rows * self.k), [-1, self.k]),
            "count": self._integers(raw, "count", rows),
            "logits": self._floats(raw, "logits", self.k),
            "log_z": self._floats(raw, "log_z", len(self.temperatures), tf.float32),
        }
        sizes = {"target_ids": length, "document_ids": input_length, "labels": rows}
        for name in self.fields:
            if name == "states":
                read[name] = self._floats(raw, name, self.state_width)
            else:
                read[name] = self._integers(raw, name, sizes[name])
        # Row of each token; behind the last there is one of zeros, for the tokens without any.
        row = tf.where(read["mask"], tf.cumsum(tf.cast(read["mask"], tf.int32)) - 1, rows)
        for name in read.keys() & set(_ROW_FIELDS):
            paddings = [[0, 1]] + [[0, 0]] * (read[name].shape.rank - 1)
            read[name] = tf.gather(tf.pad(read[name], paddings), row)
        if "labels" in read:
            read["labels"] -= 1
        return {"key": raw["key"], **read}

    def _integers(self, raw, name, count):
        return unpack_bits(raw[name], self._bits(name), count)

    def _floats(self, raw, name, width, dtype=None):
        flat = tf.io.decode_raw(raw[name], tf.as_dtype(dtype or self.logits_dtype))
        return tf.reshape(flat, [tf.cast(raw["lengths"][2], tf.int32), width])


def pack_bits(values: np.ndarray, bits: int) -> bytes:
    """Packs integers into `bits` bits each, the lowest bit first, in whole groups of eight values.

    Values of 8 and 32 bits are a plain array of uint8 and little-endian int32.

    Args:
      values: integers in [0, 2**bits), of any shape.
      bits: 1 to 32.

    Raises:
      ValueError: for a value outside that range.
    """
    if values.size and not 0 <= values.min() <= values.max() < 2**bits:
        raise ValueError(
            f"expected integers of {bits} bits; received {values.min()} to {values.max()}."
        )
    if bits in (_BYTE, _WORD):
        return values.astype("u1" if bits == _BYTE else "<i4").tobytes()
    flat = values.astype("<u4").ravel()
    flat = np.pad(flat, (0, -len(flat) % _GROUP))
    as_bits = np.unpackbits(flat.view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    return np.packbits(as_bits[:, :bits], bitorder="little").tobytes()


def unpack_bits(packed, bits: int, count) -> tf.Tensor:
    """Unpacks the first `count` integers of `pack_bits`, in TensorFlow operations: int32 `[count]`.

    Args:
      packed: scalar string.
      bits: 1 to 32.
      count: how many values there are.
    """
    if bits == _WORD:
        return tf.io.decode_raw(packed, tf.int32)[:count]
    if bits == _BYTE:
        return tf.cast(tf.io.decode_raw(packed, tf.uint8)[:count], tf.int32)
    groups = tf.cast(tf.reshape(tf.io.decode_raw(packed, tf.uint8), [-1, bits]), tf.int64)
    values = []
    for place in range(_GROUP):
        first, shift = divmod(place * bits, 8)
        last = (place * bits + bits - 1) // 8
        value = tf.add_n([groups[:, b] * 256 ** (b - first) for b in range(first, last + 1)])
        value = tf.bitwise.right_shift(value, tf.constant(shift, tf.int64))
        values.append(tf.bitwise.bitwise_and(value, 2**bits - 1))
    return tf.reshape(tf.cast(tf.stack(values, axis=1), tf.int32), [-1])[:count]


def _bytes(value):
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
