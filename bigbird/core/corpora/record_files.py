"""Records of TFRecord, JSONL, CSV and plain text files, as streams of named fields.

Fields have the names of the tasks (`text`, `label`; `document`, `summary`). Texts come as the bytes
that were stored. A faulty record is a `DataError` that names its file and place.
"""

from __future__ import annotations

import codecs
import csv
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from google.protobuf.message import DecodeError

# The one field that holds an integer; every other holds text.
LABEL = "label"

_INTEGER = re.compile(r"[+-]?[0-9]+")

# Other names under which a field may be stored.
_ALIASES = {"document": ("article", "text"), "summary": ("abstract",)}


class DataError(ValueError):
    """Data that cannot be read as asked; the message says where and what to do."""


def file_kind(path: str) -> str | None:
    """Returns `tfrecord`, `jsonl`, `csv` or `txt` by a file's name; None for any other."""
    name = os.path.basename(path)
    if ".tfrecord" in name:
        return "tfrecord"
    suffix = os.path.splitext(name)[1].removeprefix(".")
    return suffix if suffix in _TEXT_READERS else None


def field_dtype(field: str) -> tf.DType:
    """Returns the type in which a field is read."""
    return tf.int64 if field == LABEL else tf.string


def stored_name(field: str, available: Iterable[str], where: str) -> str:
    """Returns the name under which a field is stored, or raises a `DataError`."""
    available = list(available)
    for name in (field, *_ALIASES.get(field, ())):
        if name in available:
            return name
    raise DataError(
        f"{where}: expected the field {' or '.join((field, *_ALIASES.get(field, ())))}; it has "
        f"{', '.join(map(str, available)) or 'none'}."
    )


class TFRecordFiles:
    """TFRecord files of `tf.train.Example`, with one bytes or int64 value a field."""

    label_names = None

    def __init__(self, files: Sequence[str], fields: Sequence[str]):
        """Opens the files; the first record tells under which name a field is stored.

        Raises:
          DataError: where the first record cannot be read or lacks a field.
        """
        self.description = _describe(files)
        self._files = list(files)
        self._stored = {field: field for field in fields}
        for where, raw in itertools.islice(raw_records(files), 1):
            features = _parse_example(raw, where).features.feature
            self._stored = {field: stored_name(field, features, where) for field in fields}

    def records(self) -> tf.data.Dataset:
        """See `sources.RecordSource`."""
        features = {
            name: tf.io.FixedLenFeature([], field_dtype(field))
            for field, name in self._stored.items()
        }

        def parse(raw):
            example = tf.io.parse_single_example(raw, features)
            return {field: example[name] for field, name in self._stored.items()}

        records = tf.data.TFRecordDataset(self._files)
        return records.map(parse, num_parallel_calls=tf.data.AUTOTUNE)

    def locate_fault(self) -> None:
        """See `sources.RecordSource`."""
        for where, raw in raw_records(self._files):
            features = _parse_example(raw, where).features.feature
            for field, name in self._stored.items():
                stored_name(field, features, where)
                kind = "int64_list" if field == LABEL else "bytes_list"
                if len(getattr(features[name], kind).value) != 1:
                    raise DataError(
                        f"{where}: expected {name} to be a {kind} of one value; it is "
                        f"{features[name].WhichOneof('kind') or 'empty'}."
                    )


def raw_records(files: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Gives every record of TFRecord files, with words for where it is."""
    for path in files:
        number = 0
        try:
            for raw in tf.data.TFRecordDataset(path):
                yield f"{path}, record {number}", raw.numpy()
                number += 1
        except tf.errors.DataLossError as error:
            raise DataError(
                f"{path}, record {number} cannot be read: the file is truncated or damaged there, "
                f"or is no TFRecord file. Copy it again. ({error.message})"
            ) from error


def _parse_example(raw: bytes, where: str) -> tf.train.Example:
    example = tf.train.Example()
    try:
        example.ParseFromString(raw)
    except DecodeError as error:
        raise DataError(f"{where} is not a tf.train.Example: {error}") from error
    return example


class TextFiles:
    """JSONL, CSV and plain text files, read by Python."""

    def __init__(
        self,
        files: Sequence[str],
        fields: Sequence[str],
        label_files: Sequence[str],
        limit: int | None = None,
    ):
        """Opens the files.

        Args:
          files: the files to read, of one kind.
          fields: names of the fields.
          label_files: the training split's files: where one of its labels is no integer, labels
            are class names, and their ids are the places in the sorted list of these files' names.
          limit: number of records to read at most.

        Raises:
          DataError: for a faulty record in `label_files`.
        """
        self.description = _describe(files)
        self._files = files
        self._fields = fields
        self._limit = limit
        self.label_names = _class_names(label_files) if LABEL in fields else None

    def records(self) -> tf.data.Dataset:
        """See `sources.RecordSource`."""
        signature = {field: tf.TensorSpec([], field_dtype(field)) for field in self._fields}
        return tf.data.Dataset.from_generator(self._read, output_signature=signature)

    def locate_fault(self) -> None:
        """See `sources.RecordSource`."""
        for _ in self._read():
            pass

    def _read(self) -> Iterator[dict[str, bytes | int]]:
        for where, record in itertools.islice(_read_files(self._files), self._limit):
            yield {field: self._value(field, record, where) for field in self._fields}

    def _value(self, field: str, record: dict[str, Any], where: str) -> bytes | int:
        if field == LABEL:
            return self._label_id(_stored_label(record, where), where)
        text = record[stored_name(field, record, where)]
        if not isinstance(text, str):
            raise DataError(f"{where}: expected {field} to be a string; received {text!r:.80}.")
        return text.encode("utf-8", "surrogatepass")

    def _label_id(self, label: str, where: str) -> int:
        if self.label_names is None and _INTEGER.fullmatch(label):
            return int(label)
        if label not in (self.label_names or ()):
            raise DataError(
                f"{where}: the label {label!r} is none of the training split's: "
                f"{', '.join(self.label_names or ['integers'])}."
            )
        return self.label_names.index(label)


def _class_names(files: Iterable[str]) -> list[str] | None:
    labels = {_stored_label(record, where) for where, record in _read_files(files)}
    return None if all(map(_INTEGER.fullmatch, labels)) else sorted(labels)


def _stored_label(record: dict[str, Any], where: str) -> str:
    label = record[stored_name(LABEL, record, where)]
    if isinstance(label, bool) or not isinstance(label, int | str):
        raise DataError(
            f"{where}: expected an integer or a class name as label; received {label!r}."
        )
    return str(label).strip()


def _read_files(files: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Gives every record of text files, with words for where it is."""
    for path in files:
        for line, record in _TEXT_READERS[file_kind(path)](path):
            yield f"{path}, line {line}", record


def _read_json_lines(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number} is not valid JSON: {error}.") from error
        if not isinstance(record, dict):
            raise DataError(
                f"{path}, line {number}: expected a JSON object; received {line!r:.80}."
            )
        yield number, record


def _read_csv(path: str) -> Iterator[tuple[int, dict[str, str]]]:
    # Before Python 3.11 the csv module refuses NUL.
    reader = csv.reader((line.replace("\0", "\ufffd") for line in _lines(path)), strict=True)
    try:
        header = _next_row(reader)
        while (row := _next_row(reader)) is not None:
            if not row:  # an empty line
                continue
            if len(row) != len(header):
                raise DataError(
                    f"{path}, line {reader.line_num}: expected {len(header)} columns "
                    f"({', '.join(header)}); received {len(row)}."
                )
            yield reader.line_num, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num} is not valid CSV: {error}.") from error


def _next_row(reader: Iterator[list[str]]) -> list[str] | None:
    # The csv module's limit, shorter than a long document, belongs to the whole process.
    limit = csv.field_size_limit(2**31 - 1)
    try:
        return next(reader, None)
    finally:
        csv.field_size_limit(limit)


def _read_plain_lines(path: str) -> Iterator[tuple[int, dict[str, str]]]:
    for number, line in enumerate(_lines(path), start=1):
        yield number, {"text": line.rstrip("\r\n")}


def _lines(path: str) -> Iterator[str]:
    """Gives the lines of a file with their ends; bytes that are not UTF-8 survive as surrogates."""
    with tf.io.gfile.GFile(path, "rb") as file:
        for number, line in enumerate(file):
            text = line.removeprefix(codecs.BOM_UTF8) if number == 0 else line
            yield text.decode("utf-8", "surrogateescape")


_TEXT_READERS: dict[str, Callable[[str], Iterator[tuple[int, dict[str, Any]]]]] = {
    "jsonl": _read_json_lines,
    "csv": _read_csv,
    "txt": _read_plain_lines,
}


def _describe(files: Sequence[str]) -> str:
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
