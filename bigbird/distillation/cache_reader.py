"""Reading a teacher cache: one sequence by its key, or batches in a reproducible order.

Axis letters: B batch, L length, K kept.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from bigbird.distillation.cache_files import (
    CacheError,
    ShardIndex,
    no_cache,
    read_index,
    read_manifest,
    read_record,
    remedy,
    shard_path,
)
from bigbird.distillation.cache_format import RecordFormat, sequence_key
from bigbird.distillation.targets import TopKTargets


class TeacherCache:
    """A complete cache, read at random: `len`, `[key]`, and shuffled batches.

    Attributes:
      manifest: what the cache is of and how it is stored; `identity` has teacher, tokenizer, data.
      format: the `RecordFormat`.
      files: the shards, TFRecord files.
      keys: names of the sequences, in their order.
    """

    def __init__(self, directory: str | os.PathLike):
        """Opens a cache and sees that its files are there; `verify_cache` reads them too.

        Raises:
          CacheError: where there is none, it is not complete, or a file is missing or cut.
        """
        self.directory = pathlib.Path(directory)
        manifest = read_manifest(directory)
        if manifest is None:
            raise CacheError(no_cache(directory))
        if not manifest["complete"]:
            raise CacheError(
                f"The cache {directory} is not complete: start its capture again, which goes on "
                "where it stopped; after several workers, run "
                f"bigbird-cache-teacher --cache_dir={directory} --finalize."
            )
        self.manifest = manifest
        self.format = RecordFormat.from_json(manifest)
        indices = [self._open(n, shard) for n, shard in enumerate(manifest["shards"])]
        self.files = [str(shard_path(directory, number)) for number in range(len(indices))]
        self.keys = [key for index in indices for key in index.keys]
        self._token_features = {"input_ids", "mask", "ids", "logits", "count", "log_z"}
        self._token_features.update(self.format.fields)
        self._rows = {key: row for row, key in enumerate(self.keys)}
        # Of each record: shard, first byte, size, checksum.
        self._places = np.array(
            [
                (number, *place)
                for number, index in enumerate(indices)
                for place in zip(index.offsets, index.sizes, index.checksums, strict=True)
            ],
            np.int64,
        ).reshape(-1, 4)

    def _open(self, number: int, shard: Mapping[str, Any]) -> ShardIndex:
        path = shard_path(self.directory, number)
        index = read_index(self.directory, number)
        found = path.stat().st_size if path.exists() else "no file"
        if index is None or index.summary != {k: v for k, v in shard.items() if k != "name"}:
            fault = "its index does not belong to the manifest"
        elif found != shard["bytes"]:
            fault = f"expected {shard['bytes']} bytes, found {found}"
        else:
            return index
        raise CacheError(f"{path}: {fault}. {remedy(self.directory)}")

    def __len__(self):
        return len(self.keys)

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def __getitem__(self, key: str) -> dict[str, tf.Tensor]:
        """Returns one sequence as `RecordFormat.decode` does."""
        if key not in self._rows:
            raise KeyError(f"{self.directory} holds no sequence {key}.")
        return self.format.decode(self._read(self._rows[key]))

    def targets(self, batch: Mapping[str, tf.Tensor], temperature: float = 1.0) -> TopKTargets:
        """Returns the targets of a batch that `dataset` made at this temperature."""
        return TopKTargets(
            batch["ids"],
            batch["logits"],
            batch.get("log_z"),
            self.format.vocab_size,
            batch["count"],
            temperature,
        )

    def dataset(
        self,
        batch_size: int,
        *,
        temperature: float = 1.0,
        k: int | None = None,
        training: bool = True,
        seed: int = 0,
        start_step: int = 0,
        num_workers: int = 1,
        worker_index: int = 0,
        inputs: tf.data.Dataset | None = None,
        pad_to_batch: bool = False,
        block_size: int = 1,
    ) -> tf.data.Dataset:
        """Returns batches of the student's inputs and the teacher's targets.

        In training the stream has no end. The order of an epoch is a permutation of all sequences
        that depends on (seed, epoch) only, and `start_step=n` gives exactly the rest of a stream
        from 0, at once: nothing before it is read.

        Args:
          batch_size: sequences of a batch, of one worker.
          temperature: whose normaliser the batches have; none where it is not stored.
          k: entries of a row to read, the likeliest; all where None.
          training: endless, shuffled, every batch full; otherwise every sequence once and in order,
            where the last batch may be smaller.
          seed: with the epoch, decides the order.
          start_step: number of training batches already seen.
          num_workers, worker_index: of each `num_workers` sequences in the shuffled order, which
            one is this worker's.
          inputs: what the student reads, to be joined by key: dicts of `input_ids` `[L]` (and
            `target_ids`), and what else the student wants. Padding behind the ids is left out of
            the key. Order and end are then those of `inputs`. None: the sequences of the cache.
          pad_to_batch: pad to the longest sequence of a batch, not of the cache.
          block_size: lengths are rounded up to a multiple of it.

        Returns:
          A dataset of dicts: `input_ids` `[B, L]`, padded with the cache's `pad_id`; `mask`, bool
          `[B, L]`; `ids`, `logits` `[B, L, K]`; `count`, `log_z` `[B, L]`, and the optional fields.

        Raises:
          ValueError: for an argument outside its range.
          tf.errors.OpError: later, where a record is damaged or an input is not in the cache.
        """
        if batch_size < 1 or start_step < 0 or not 0 <= worker_index < num_workers:
            raise ValueError(
                "Expected batch_size >= 1, start_step >= 0 and 0 <= worker_index < num_workers; "
                f"received batch_size={batch_size}, start_step={start_step}, "
                f"worker_index={worker_index}, num_workers={num_workers}."
            )
        if k is not None and not 1 <= k <= self.format.k:
            raise ValueError(f"k={k}: expected 1 to {self.format.k}, which the cache has.")
        if inputs is None:
            start = start_step * batch_size * num_workers
            rows = self._order(training, seed, start).shard(num_workers, worker_index)
            examples = rows.map(self._example, num_parallel_calls=tf.data.AUTOTUNE)
        else:
            examples = inputs.map(self._join, num_parallel_calls=tf.data.AUTOTUNE)
        examples = examples.map(lambda example: self._select(example, temperature, k))
        shapes, fill = self._padding(examples.element_spec, pad_to_batch, block_size)
        batches = examples.padded_batch(batch_size, shapes, fill, drop_remainder=training)
        if pad_to_batch and block_size > 1:
            batches = batches.map(lambda batch: self._round_up(batch, fill, block_size))
        return batches.prefetch(tf.data.AUTOTUNE)

    def _order(self, training, seed, start):
        """Rows of the cache: once in order, or endless, each epoch in another order."""
        if not training:
            return tf.data.Dataset.range(len(self))
        first_epoch, seen = divmod(start, len(self))

        def shuffled(epoch):
            order = tf.random.experimental.stateless_shuffle(
                tf.range(len(self), dtype=tf.int64), seed=[seed, epoch], alg="philox"
            )
            return tf.data.Dataset.from_tensor_slices(order)

        return tf.data.Dataset.range(first_epoch, tf.int64.max).flat_map(shuffled).skip(seen)

    def _read(self, row):
        number, offset, size, checksum = self._places[row].tolist()
        return read_record(self.files[number], offset, size, checksum)

    def _example(self, row):
        """The decoded record of a row, in the graph."""
        record = tf.numpy_function(self._read, [row], tf.string, stateful=False)
        return self.format.decode(tf.ensure_shape(record, []))

    def _join(self, features):
        """The features of an input with what the teacher said of it, found by key."""
        names = ["input_ids"] + ["target_ids"] * ("target_ids" in self.format.fields)
        row = tf.numpy_function(self._find, [features[n] for n in names], tf.int64, stateful=False)
        return {**features, **self._example(tf.ensure_shape(row, []))}

    def _find(self, *ids):
        pad_id = self.manifest["pad_id"]
        key = sequence_key(*(_without_padding(each, pad_id) for each in ids))
        if key not in self._rows:
            raise CacheError(
                f"{self.directory} holds no sequence of the content {ids[0][:8]} …: capture the "
                "teacher on these inputs, tokenised and cut alike."
            )
        return np.int64(self._rows[key])

    def _select(self, example, temperature, k):
        """What a batch needs of an example: one normaliser, the k likeliest ids, no key."""
        example = {name: value for name, value in example.items() if name != "key"}
        log_z = example.pop("log_z")
        if temperature in self.format.temperatures:
            example["log_z"] = log_z[:, self.format.temperatures.index(temperature)]
        if k is not None:
            example["ids"], example["logits"] = example["ids"][:, :k], example["logits"][:, :k]
            example["count"] = tf.minimum(example["count"], k)
        return example

    def _padding(self, specs, pad_to_batch, block_size):
        """Shapes and values to pad to, by feature."""

        def rounded(name):
            return -(-self.manifest[name] // block_size) * block_size

        length, input_length = rounded("max_length"), rounded("max_input_length")
        shapes, fill = {}, {}
        for name, spec in specs.items():
            shapes[name] = spec.shape
            if name in ("input_ids", "document_ids"):
                shapes[name] = [None if pad_to_batch else input_length]
            elif name in self._token_features:
                shapes[name] = [None if pad_to_batch else length, *spec.shape[1:]]
            pad_id = self.manifest["pad_id"]
            value = {"input_ids": pad_id, "target_ids": pad_id, "labels": -1}.get(name, 0)
            fill[name] = tf.cast(value, spec.dtype) if spec.dtype != tf.string else ""
        return shapes, fill

    def _round_up(self, batch, fill, block_size):
        """Pads the length of every feature of the cache, `[B, L, …]`, to whole blocks."""
        for name in self._token_features & batch.keys():
            missing = -tf.shape(batch[name])[1] % block_size
            paddings = [[0, 0], [0, missing]] + [[0, 0]] * (batch[name].shape.rank - 2)
            batch[name] = tf.pad(batch[name], paddings, constant_values=fill[name])
        return batch


def _without_padding(ids, pad_id):
    """The ids up to the last that is not padding."""
    (places,) = np.nonzero(ids != pad_id)
    return ids[: places[-1] + 1] if len(places) else ids[:0]
