"""Predictions of a whole file that survive a kill: appended batch by batch, taken up, renamed.

While a prediction is made, `<path>.partial` grows: its first line says what is predicted, each
further line is one example's. A process that is killed loses at most the batch it was computing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any, BinaryIO

import numpy as np
import tf_keras as keras
from absl import logging

from bigbird.core.callbacks import differences
from bigbird.core.data import ExampleSource
from bigbird.core.run_lock import hold


def predict_to_file(
    source: ExampleSource,
    predict: Callable[[dict[str, np.ndarray]], Iterable[Mapping[str, Any]]],
    path: str,
    identity: Mapping[str, Any],
    batch_size: int,
    verbose: int = 1,
) -> None:
    """Predicts every example of a source, one JSON line each, in the order of the source.

    Killed at any moment and called again, it goes on after the last batch that was written. The
    finished file is then the same as without the kill, byte for byte, where `predict` is a function
    of its batch alone.

    Args:
      source: the examples.
      predict: takes a batch `{field: values [B]}` and returns one dict of JSON values an example;
        `index` is added.
      path: local file, which appears under this name when it is whole.
      identity: what decides the predictions, as JSON values; such as the weights and settings.
      batch_size: examples of a batch.
      verbose: 0 shows nothing, 1 a progress bar, 2 a line in a minute.

    Raises:
      ValueError: if `path` is not local, another process writes to it, or the predictions that were
        begun there are others.
    """
    if "://" in path:
        raise ValueError(f"Predictions are written to a local file; received {path}.")
    identity = {**identity, "input": _fingerprint(source), "batch_size": batch_size}
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    partial = f"{path}.partial"
    with open(partial, "a+b") as file:
        hold(file, partial)
        done = _take_up(file, identity)
        if done:
            logging.info("%s holds %d of %d already.", partial, done, source.num_examples)
        progress = keras.utils.Progbar(source.num_examples, unit_name="example", verbose=verbose)
        for batch in source.dataset.batch(batch_size).skip(done // batch_size).as_numpy_iterator():
            rows = [{"index": done + i, **row} for i, row in enumerate(predict(batch))]
            _append(file, rows)
            done += len(rows)
            progress.update(done)
            if verbose == 2:
                told = (done, source.num_examples, partial)
                logging.log_every_n_seconds(logging.INFO, "%d of %d examples are in %s.", 60, *told)
        _copy_without_header(file, path)
        os.remove(partial)


def read_predictions(path: str) -> list[dict[str, Any]]:
    """Returns the lines of a finished file."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _fingerprint(source: ExampleSource) -> str:
    """Returns a hash of every value of the source: a changed input is not taken up."""
    values = hashlib.sha256()
    for example in source.dataset.as_numpy_iterator():
        for field in sorted(example):
            value = example[field]
            encoded = value if isinstance(value, bytes) else str(value).encode()
            values.update(f"{field} {len(encoded)} ".encode() + encoded)
    return values.hexdigest()


def _take_up(file: BinaryIO, identity: Mapping[str, Any]) -> int:
    """Leaves the header and whole batches in the file; returns the number of examples they hold."""
    file.seek(0)
    header, *lines = file.read().splitlines(keepends=True) or [b""]
    if not header.endswith(b"\n"):
        file.truncate(0)
        _append(file, [identity])
        return 0
    _check_identity(json.loads(header), identity, file.name)
    whole = 0
    while whole < len(lines) and _is_line_of(lines[whole], whole):
        whole += 1
    # The end of all examples may be a smaller batch: that one is predicted again.
    whole -= whole % identity["batch_size"]
    file.truncate(len(header) + sum(map(len, lines[:whole])))
    return whole


def _is_line_of(line: bytes, index: int) -> bool:
    """Whether a line is whole and in its place: a crash of the machine may have torn it."""
    try:
        return line.endswith(b"\n") and json.loads(line)["index"] == index
    except (ValueError, TypeError, KeyError):
        return False


def _check_identity(begun: Mapping[str, Any], identity: Mapping[str, Any], name: str):
    if found := differences(begun, identity):
        raise ValueError(
            f"{name} holds the beginning of another prediction ({found}). Go on with the settings "
            "it was begun with, remove it, or choose another --output_file."
        )


def _append(file: BinaryIO, rows: Iterable[Mapping[str, Any]]):
    file.write("".join(f"{json.dumps(row)}\n" for row in rows).encode())
    file.flush()
    os.fsync(file.fileno())


def _copy_without_header(file: BinaryIO, path: str):
    file.seek(0)
    file.readline()
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as whole:
        shutil.copyfileobj(file, whole)
        whole.flush()
        os.fsync(whole.fileno())
    os.replace(temporary, path)
