"""Top-K log-probabilities of a teacher elsewhere, from NumPy or Parquet files, as cache records.

Axis letters: L tokens of a sequence, K entries that are kept, E entries as they come.

One sequence is a row of a Parquet file, or an index of the first axis of the arrays of an `.npz`:

| name        | shape    |                                                                     |
| ----------- | -------- | ------------------------------------------------------------------- |
| `input_ids` | `[L]`    | what the teacher read                                               |
| `ids`       | `[L, E]` | ids in any order, E of K or more; negative where absent             |
| `logprobs`  | `[L, E]` | their log-probabilities, or `logits`: raw; -inf or NaN where absent |
| `log_z`     | `[L]`    | log-normaliser of `logits` at temperature 1; optional               |
| `mask`      | `[L]`    | tokens that take part; optional                                     |
| `length`    | scalar   | tokens of the sequence, where arrays are padded; optional           |

Log-probabilities are normalised already, at temperature 1. Without a normaliser, logits tell the
shares of the kept ids only.

What row t tells of is `row_kind`:

- `next`: the token after t, as a causal model's own outputs do.
- `prompt`: token t before it was read, as serving engines report: there is no row of the first
  token, be it empty or left out, and the token that came is added to the K likeliest. Stored as
  `next`, so that the same text gives the same rows from either.
- `same`: token t, as those of masked and sequence to sequence models do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import numpy as np

from bigbird.distillation.cache_format import TeacherRecord, sequence_key
from bigbird.distillation.targets import TopKTargets, require_choice

ROW_KINDS = ("next", "prompt", "same")
_FIELDS = ("input_ids", "ids", "logprobs", "logits", "log_z", "mask", "length")

Arrays = Mapping[str, np.ndarray]


def read_arrays(path: str | os.PathLike) -> Iterator[dict[str, np.ndarray]]:
    """Gives the arrays of each sequence of an `.npz` or `.parquet` file.

    Raises:
      ValueError: for another kind of file, or one that lacks a needed array.
    """
    suffix = os.path.splitext(path)[1]
    require_choice("The kind of an imported file", suffix, tuple(_READERS))
    for number, sequence in enumerate(_READERS[suffix](path)):
        missing = {"input_ids", "ids"} - sequence.keys()
        if missing or ("logprobs" in sequence) == ("logits" in sequence):
            raise ValueError(
                f"{path}, sequence {number}: expected input_ids, ids and either logprobs or "
                f"logits; it has {', '.join(sequence)}."
            )
        yield sequence


def has_normaliser(sequence: Arrays) -> bool:
    """Whether the arrays tell the mass of the kept ids."""
    return "logprobs" in sequence or "log_z" in sequence


def record_of(sequence: Arrays, vocab_size: int, k: int, row_kind: str = "next") -> TeacherRecord:
    """Makes a cache record of a sequence's arrays.

    Args:
      sequence: from `read_arrays`.
      vocab_size: V of the teacher's head.
      k: entries to keep, the likeliest.
      row_kind: what a row tells of; see the top of this file.

    Raises:
      ValueError: for arrays whose lengths do not belong together.
    """
    require_choice("row_kind", row_kind, ROW_KINDS)
    length = int(sequence.get("length", len(sequence["input_ids"])))
    input_ids = np.asarray(sequence["input_ids"][:length], np.int32)
    values = sequence["logprobs"] if "logprobs" in sequence else sequence["logits"]
    rows = {"ids": sequence["ids"], "values": np.asarray(values, np.float32)}
    rows |= {name: sequence[name] for name in ("log_z", "mask") if name in sequence}
    rows = {name: _aligned(name, array, length, row_kind) for name, array in rows.items()}
    ids, logits, count = _likeliest(rows["ids"], rows["values"], k)
    log_z = rows.get("log_z")
    if "logprobs" in sequence:
        log_z = np.zeros(length, np.float32)
    mask = rows.get("mask", np.ones(length, bool)).astype(bool) & (count > 0)
    if row_kind != "same":
        # Nothing is known to follow the last token.
        mask[-1:] = False
    targets = TopKTargets(ids, logits, log_z, vocab_size, count)
    return TeacherRecord(sequence_key(input_ids), input_ids, targets, mask)


def _aligned(name, array, length, row_kind):
    """Rows `[L, …]`, moved to where they are stored; zeros where there is none."""
    array = np.asarray(array)
    if row_kind == "prompt":
        # The row of the first token is empty, or is not there.
        array = array[1:length] if len(array) >= length else array
        array = np.pad(array, [(0, 1)] + [(0, 0)] * (array.ndim - 1), constant_values=-1)
    if len(array) < length:
        raise ValueError(
            f"expected {name} of {length} rows, one for each of input_ids; received {len(array)}."
        )
    return array[:length]


def _likeliest(ids, values, k):
    """The k largest entries of each row, each id once: ids, values `[L, K]`, count `[L]`."""
    absent = (ids < 0) | ~np.isfinite(values)
    values = np.where(absent, -np.inf, values)
    # The larger of two entries of one id comes first, and the other goes.
    order = np.lexsort((-values, ids), axis=-1)
    by_id = np.take_along_axis(ids, order, -1)
    repeated = np.zeros(ids.shape, bool)
    repeated[:, 1:] = by_id[:, 1:] == by_id[:, :-1]
    values = np.where(repeated, -np.inf, np.take_along_axis(values, order, -1))
    # Sorted by id already, a stable sort gives ties to the lower one, whatever order they came in.
    order = np.argsort(-values, axis=-1, kind="stable")[:, :k]
    values = np.take_along_axis(values, order, -1)
    present = np.isfinite(values)
    ids = np.where(present, np.take_along_axis(by_id, order, -1), 0)
    return ids, np.where(present, values, -np.inf), present.sum(-1)


def _read_npz(path):
    with np.load(path) as arrays:
        fields = {name: arrays[name] for name in _FIELDS if name in arrays}
    for number in range(min(map(len, fields.values()), default=0)):
        yield {name: array[number] for name, array in fields.items()}


def _read_parquet(path):
    # Imported here because only Parquet files need it.
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    columns = [name for name in _FIELDS if name in file.schema_arrow.names]
    for batch in file.iter_batches(batch_size=16, columns=columns):
        for row in range(len(batch)):
            yield {name: _array(batch[name][row], name) for name in columns}


def _array(scalar, name):
    """A Parquet value as an array; lists of lists are filled up with what means absent."""
    import pyarrow

    if not pyarrow.types.is_nested(scalar.type):
        return np.asarray(scalar.as_py())
    values = scalar.values
    if not pyarrow.types.is_nested(values.type):
        return values.to_numpy(zero_copy_only=False)
    lengths = np.nan_to_num(values.value_lengths().to_numpy(zero_copy_only=False)).astype(int)
    fill = -1 if name == "ids" else -np.inf
    flat = values.flatten().to_numpy(zero_copy_only=False)
    whole = np.full([len(lengths), max(lengths, default=0)], fill, flat.dtype)
    whole[np.arange(whole.shape[1]) < lengths[:, np.newaxis]] = flat
    return whole


_READERS = {".npz": _read_npz, ".parquet": _read_parquet}
