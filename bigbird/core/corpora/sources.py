"""Where records come from: an address to files, built-in documents or a prepared TFDS data set.

`open_records` chooses the kind of source from the address; `RecordSource` is what a kind offers.
"""

from __future__ import annotations

import os
import re
import urllib.parse
from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf
import tensorflow_datasets as tfds

from bigbird.core.corpora import builtin_documents, builtin_summaries
from bigbird.core.corpora.record_files import (
    LABEL,
    DataError,
    TextFiles,
    TFRecordFiles,
    field_dtype,
    file_kind,
    raw_records,
    stored_name,
)

_SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}


# What follows builtin:// -> the module that makes that data set.
_BUILTIN = {"documents": builtin_documents, "summaries": builtin_summaries}


class RecordSource(Protocol):
    """What every kind of source offers.

    Attributes:
      description: what messages call the source.
      label_names: class names in the order of their ids; None where labels are stored as integers.
    """

    description: str
    label_names: list[str] | None

    def records(self) -> tf.data.Dataset:
        """Returns dicts of scalars `{field: string or int64}`, always in the same order."""

    def locate_fault(self) -> None:
        """Reads record by record, slowly, and raises a `DataError` at the first faulty one."""


def open_records(
    data_dir: str,
    split: str | None,
    fields: Sequence[str],
    tfds_data_dir: str | None = None,
    flag: str = "data_dir",
) -> RecordSource:
    """Opens the source at an address.

    Args:
      data_dir: `tfds://name/config`, `builtin://documents` or `builtin://summaries` (`?limit=64`
        for the first 64 of the split), a directory of TFRecord, JSONL or CSV files, or one such
        file (or `.txt`, one document a line), which then serves every split.
      split: `train`, `validation` or `test`; None takes every file.
      fields: names of the fields to read.
      tfds_data_dir: where TFDS keeps prepared data sets; its own default where None.
      flag: the flag that gave the address, which messages name.

    Raises:
      DataError: where nothing is found there, or not with these fields.
    """
    if data_dir.startswith("tfds://"):
        return PreparedTfds(data_dir.removeprefix("tfds://"), split, fields, tfds_data_dir)
    if data_dir.startswith("builtin://"):
        return _open_builtin(data_dir, split, fields)
    files = find_files(data_dir, split, flag)
    if file_kind(files[0]) == "tfrecord":
        return TFRecordFiles(files, fields)
    return TextFiles(files, fields, label_files=_files_that_define_labels(data_dir, files))


def find_files(data_dir: str, split: str | None, flag: str = "data_dir") -> list[str]:
    """Returns the files of a split, sorted.

    A file belongs to the split that is a word of its name (`imdb-train-00001.tfrecord`) or else of
    a folder below `data_dir` (`dev/part.jsonl`). Files that name no split are training files where
    no file names `train`. If `data_dir` is a file, it is the only one.

    Raises:
      DataError: where there is no such file, or where the split's files are of several kinds.
    """
    given = f"--{flag}={data_dir}"
    try:
        exists = tf.io.gfile.exists(data_dir)
    except tf.errors.UnimplementedError as error:
        raise DataError(
            f"{given}: expected tfds://…, builtin://… or a path. ({error.message})"
        ) from error
    if not exists:
        raise DataError(f"{given}: there is no such file or directory.")
    if not tf.io.gfile.isdir(data_dir):
        if file_kind(data_dir) is None:
            raise DataError(
                f"{given}: expected a name with .tfrecord in it, or ending in .jsonl, .csv or .txt."
            )
        return [data_dir]
    files = _data_files_below(data_dir)
    if not files:
        raise DataError(
            f"{given} holds no *.tfrecord*, *.jsonl or *.csv file: put the data there, such as "
            "train.jsonl and test.jsonl, or name another place."
        )
    found = _files_of_split(data_dir, files, split)
    if not found:
        raise DataError(
            f"{given} holds {len(files)} data files, but none of the split {split}: "
            f"put `{split}` into the name of a file or of its folder."
        )
    kinds = {file_kind(path) for path in found}
    if len(kinds) > 1:
        raise DataError(
            f"{given} holds files of several kinds ({', '.join(sorted(kinds))}): "
            "leave one kind, or give one file."
        )
    return found


def _data_files_below(directory: str) -> list[str]:
    # A .txt in a directory is more often a read-me or a list of labels than data.
    return sorted(
        os.path.join(folder, name)
        for folder, _, names in tf.io.gfile.walk(directory)
        for name in names
        if not name.startswith((".", "_")) and file_kind(name) in ("tfrecord", "jsonl", "csv")
    )


def _files_of_split(data_dir: str, files: Sequence[str], split: str | None) -> list[str]:
    if split is None:
        return list(files)
    splits = {path: _split_named_by(os.path.relpath(path, data_dir)) for path in files}
    wanted = None if split == "train" and "train" not in splits.values() else split
    return [path for path in files if splits[path] == wanted]


def _split_named_by(relative_path: str) -> str | None:
    for part in reversed(relative_path.lower().split(os.sep)):
        for word in re.findall("[a-z]+", part):
            if word in _SPLIT_WORDS:
                return _SPLIT_WORDS[word]
    return None


def _files_that_define_labels(data_dir: str, files: Sequence[str]) -> Sequence[str]:
    # The ids of class names must not depend on the split that is read.
    if not tf.io.gfile.isdir(data_dir):
        return files
    return _files_of_split(data_dir, _data_files_below(data_dir), "train") or files


def _open_builtin(data_dir: str, split: str | None, fields: Sequence[str]) -> TextFiles:
    address = urllib.parse.urlsplit(data_dir)
    match = re.fullmatch(r"(?:limit=([1-9]\d*))?", address.query)
    if address.netloc not in _BUILTIN or address.path not in ("", "/") or not match:
        raise DataError(
            f"--data_dir={data_dir}: expected builtin://documents, builtin://summaries or, for the "
            "first 64 of the split, builtin://documents?limit=64."
        )
    if split not in builtin_documents.SPLITS:
        raise DataError(
            f"{data_dir} has the splits {', '.join(builtin_documents.SPLITS)}; received {split}."
        )
    folder = _BUILTIN[address.netloc].prepare()
    limit = int(match[1]) if match[1] else None
    return TextFiles(
        [str(folder / f"{split}.jsonl")],
        fields,
        label_files=[str(folder / "train.jsonl")],
        limit=limit,
    )


class PreparedTfds:
    """A split of a data set that TFDS has prepared; nothing is ever downloaded."""

    def __init__(self, name: str, split: str | None, fields: Sequence[str], data_dir: str | None):
        """Opens the split; `name` is `dataset/config`.

        Raises:
          DataError: where it is not prepared, or lacks the split or a field.
        """
        self.description = f"tfds://{name}, split {split}"
        self._builder = _prepared_builder(name, data_dir)
        splits = self._builder.info.splits
        if split not in splits:
            raise DataError(f"tfds://{name} has the splits {', '.join(splits)}; received {split}.")
        self._split = split
        features = self._builder.info.features
        self._stored = {f: stored_name(f, features, self.description) for f in fields}
        self._check_types()
        label = features[LABEL] if LABEL in fields else None
        self.label_names = label.names if isinstance(label, tfds.features.ClassLabel) else None

    def records(self) -> tf.data.Dataset:
        """See `RecordSource`."""
        return self._examples().map(
            lambda example: {
                field: tf.cast(example[name], field_dtype(field))
                for field, name in self._stored.items()
            }
        )

    def locate_fault(self) -> None:
        """See `RecordSource`."""
        for _ in raw_records(map(str, self._builder.info.splits[self._split].filepaths)):
            pass

    def _examples(self) -> tf.data.Dataset:
        return self._builder.as_dataset(
            split=self._split,
            shuffle_files=False,
            read_config=tfds.ReadConfig(try_autocache=False),
        )

    def _check_types(self):
        specs = self._examples().element_spec
        for field, name in self._stored.items():
            spec = specs[name]
            fits = spec.dtype.is_integer if field == LABEL else spec.dtype == tf.string
            if not fits or spec.shape.rank != 0:
                raise DataError(
                    f"{self.description}: expected {name} to be one "
                    f"{'integer' if field == LABEL else 'string'}; it is {spec}."
                )


def _prepared_builder(name: str, data_dir: str | None) -> tfds.core.DatasetBuilder:
    try:
        builder = tfds.builder(name, data_dir=data_dir)
    except ValueError as error:
        # TFDS goes on to list every data set it knows.
        reason = str(error).splitlines()[0]
        raise DataError(f"--data_dir=tfds://{name}: {reason}") from error
    if not builder.is_prepared():
        raise DataError(
            f"--data_dir=tfds://{name} is not prepared: {builder.data_dir} does not exist. Set "
            "--tfds_data_dir to where it is, or prepare it with network access: python -c 'import "
            f'tensorflow_datasets as tfds; tfds.builder("{name}").download_and_prepare()\''
        )
    return builder
