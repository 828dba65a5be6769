"""Writing a teacher cache: shard by shard, taken up where a stopped process left it."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bigbird.core.callbacks import differences
from bigbird.distillation.cache_files import (
    CacheError,
    ShardWriter,
    index_path,
    read_index,
    read_manifest,
    shard_numbers,
    shard_path,
    write_manifest,
    writer_lock,
)
from bigbird.distillation.cache_format import ALIGNMENTS, RecordFormat, TeacherRecord
from bigbird.distillation.targets import require_choice

FORMAT_VERSION = 1
# What `finalize_cache` adds to the manifest.
_LONGEST = ("max_length", "max_input_length", "max_rows")
_OUTCOME = ("complete", "sequences", "tokens", "bytes", *_LONGEST, "shards")


class TeacherCacheWriter:
    """Writes a cache, or takes up one that a stopped process left.

    Sequences go to shards in the order they come. A sequence that is stored already is passed over,
    so the loop that wrote the cache, started again, goes on behind the last finished shard and ends
    with the same bytes. Leaving the block after an error gives up the shard that was begun.

    Attributes:
      format: the `RecordFormat`.
      shards: the finished shards, `ShardIndex` by number, those of other workers included.
      shard_sequences, num_shards, shard_index: as given.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        vocab_size: int,
        k: int,
        temperatures: Sequence[float] = (1.0,),
        identity: Mapping[str, Any] | None = None,
        shard_sequences: int = 256,
        expected_sequences: int | None = None,
        alignment: str = "same",
        pad_id: int = 0,
        num_shards: int = 1,
        shard_index: int = 0,
        **layout,
    ):
        """Opens a cache for writing; the directory is made.

        Args:
          directory: of the cache, on a local or mounted file system.
          vocab_size: V of the teacher's head.
          k: K, entries of a row.
          temperatures: those at which the normaliser is stored.
          identity: what teacher, tokenizer and data are, as JSON values.
          shard_sequences: sequences of a shard.
          expected_sequences: how many the finished cache has, where that is known.
          alignment: what row t tells of: token t, `same`, or token t + 1, `next`.
          pad_id: id that fills up `input_ids` in batches.
          num_shards, shard_index: this worker writes the shards whose number is `shard_index`
            modulo `num_shards`; after the last worker call `finalize_cache`.
          **layout: `compact`, `logits_dtype`, `fields` and `state_width` of `RecordFormat`.

        Raises:
          CacheError: where another process writes there, or the directory holds another cache; the
            message names both sides.
          ValueError: for an argument outside its range.
        """
        require_choice("alignment", alignment, ALIGNMENTS)
        if shard_sequences < 1 or not 0 <= shard_index < num_shards:
            raise ValueError(
                "Expected shard_sequences >= 1 and 0 <= shard_index < num_shards; received "
                f"shard_sequences={shard_sequences}, shard_index={shard_index}, "
                f"num_shards={num_shards}."
            )
        self.directory = pathlib.Path(directory)
        self.format = RecordFormat(vocab_size, k, tuple(map(float, temperatures)), **layout)
        self._manifest = {
            "format": FORMAT_VERSION,
            **self.format.to_json(),
            "alignment": alignment,
            "pad_id": pad_id,
            "shard_sequences": shard_sequences,
            "expected_sequences": expected_sequences,
            "identity": dict(identity or {}),
        }
        self.shard_sequences = shard_sequences
        self.num_shards, self.shard_index = num_shards, shard_index
        self._shard = None
        self._resources = contextlib.ExitStack()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._resources.enter_context(writer_lock(self.directory, shard_index, num_shards))
        try:
            self._claim()
            indices = ((n, read_index(self.directory, n)) for n in shard_numbers(self.directory))
            self.shards = {number: index for number, index in indices if index is not None}
        except BaseException:
            self._resources.close()
            raise
        self._stored = {key for index in self.shards.values() for key in index.keys}

    def _claim(self):
        """Writes the manifest of a new cache, or compares that of the one there is."""
        there = read_manifest(self.directory) or {}
        self._is_complete = there.get("complete", False)
        claimed = {name: value for name, value in there.items() if name not in _OUTCOME}
        found = differences(claimed, self._manifest) if there else ""
        if found:
            raise CacheError(
                f"{self.directory} holds another cache ({found}). Choose another "
                "directory, or the settings of that cache."
            )
        if not there:
            write_manifest(self.directory, {**self._manifest, "complete": False})

    def __enter__(self):
        return self

    def __exit__(self, error_type, error, traceback):
        if error_type is None:
            self.close()
        else:
            self._give_up()

    def __contains__(self, key: str) -> bool:
        """Whether a sequence is stored or about to be."""
        return key in self._stored

    def write(self, key: str, input_ids, targets, mask=None, **optional) -> bool:
        """Stores what the teacher says of a sequence.

        Args:
          key: its `sequence_key`, or another name that tells its content.
          input_ids, targets, mask: as in `TeacherRecord`.
          **optional: `target_ids`, `document_ids`, `labels`, `states` of `TeacherRecord`, those
            that are in `fields`.

        Returns:
          False for a sequence that is stored already, else True.

        Raises:
          CacheError: where the cache was complete and lacks the sequence.
          ValueError: for arrays that do not fit or hold faulty values.
          OSError: where the disk is full or fails.
        """
        if key in self._stored:
            return False
        if self._shard is None:
            self._shard = self._begin(self._next_number())
        self._add(self._shard, TeacherRecord(key, input_ids, targets, mask, **optional))
        if len(self._shard) == self.shard_sequences:
            self._finish()
        return True

    @contextlib.contextmanager
    def shard(self, number: int) -> Iterator[Callable[[TeacherRecord], None]]:
        """Writes one shard by its number: gives a function of `TeacherRecord`s.

        The shard is finished at the end of the block and given up after an error.
        """
        shard = self._begin(number)
        try:
            yield lambda record: self._add(shard, record)
            self.shards[number] = shard.finish()
        except BaseException:
            shard.abort()
            raise

    def close(self) -> None:
        """Finishes the last shard; a single worker then completes the manifest.

        Raises:
          CacheError: where sequences are missing.
          OSError: where the disk is full or fails.
        """
        try:
            if self._shard is not None:
                self._finish()
            if self.num_shards == 1:
                finalize_cache(self.directory)
        finally:
            self._give_up()

    def _begin(self, number):
        if self._is_complete:
            raise CacheError(
                f"{self.directory} is complete, and the sequence is not in it. Capture other data "
                "into another directory."
            )
        return ShardWriter(self.directory, number)

    def _next_number(self):
        number = self.shard_index
        while number in self.shards:
            number += self.num_shards
        return number

    def _add(self, shard, record):
        encoded = self.format.encode(record)
        rows = record.length if record.mask is None else int(np.sum(record.mask))
        shard.write(record.key, encoded, record.length, len(record.input_ids), rows)
        self._stored.add(record.key)

    def _finish(self):
        self.shards[self._shard.number] = self._shard.finish()
        self._shard = None

    def _give_up(self):
        if self._shard is not None:
            self._shard.abort()
            self._shard = None
        self._resources.close()


def forget_shards(directory: str | os.PathLike, numbers: Iterable[int]) -> None:
    """Marks shards as not finished, so that the next capture writes them again.

    Raises:
      CacheError: where another process writes there, or there is no cache.
    """
    with writer_lock(directory):
        manifest = read_manifest(directory)
        if manifest is None:
            raise CacheError(f"{directory} holds no cache.")
        expected = manifest["expected_sequences"]
        for number in numbers:
            index_path(directory, number).unlink(missing_ok=True)
            if expected is not None and number * manifest["shard_sequences"] >= expected:
                # It belongs to no sequence of this cache.
                shard_path(directory, number).unlink(missing_ok=True)
        kept = {name: value for name, value in manifest.items() if name not in _OUTCOME}
        write_manifest(directory, {**kept, "complete": False})


def finalize_cache(directory: str | os.PathLike) -> dict[str, Any]:
    """Joins the shards of all workers: completes the manifest and returns it.

    Raises:
      CacheError: where there is no capture, or shards or sequences are missing.
    """
    manifest = read_manifest(directory)
    if manifest is None:
        raise CacheError(f"{directory} holds no cache: capture a teacher there first.")
    numbers = shard_numbers(directory)
    indices = {number: read_index(directory, number) for number in numbers}
    missing = [
        number
        for number in range(max(numbers, default=-1) + 1)
        if indices.get(number) is None or not shard_path(directory, number).exists()
    ]
    if missing:
        raise CacheError(
            f"{directory} is not complete: the shards {missing} are missing. Run the capture of "
            "their workers again; it goes on where it stopped."
        )
    sequences = sum(len(index.keys) for index in indices.values())
    expected = manifest["expected_sequences"]
    if expected is not None and sequences != expected:
        raise CacheError(
            f"{directory} is not complete: it has {sequences} of {expected} sequences. Run the "
            "capture of every worker to its end."
        )
    manifest |= {
        "complete": True,
        "sequences": sequences,
        "tokens": sum(index.tokens for index in indices.values()),
        "bytes": sum(index.bytes for index in indices.values()),
        **{n: max((getattr(i, n) for i in indices.values()), default=0) for n in _LONGEST},
        "shards": [{"name": shard_path("", n).name, **indices[n].summary} for n in numbers],
    }
    write_manifest(directory, manifest, alone=True)
    return manifest
