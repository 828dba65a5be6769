"""Checks a teacher cache from end to end: digests, records, counts, keys, and what is missing."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from bigbird.distillation.cache_files import (
    CacheError,
    file_sha256,
    index_path,
    no_cache,
    read_index,
    read_manifest,
    read_record,
    shard_numbers,
    shard_path,
)
from bigbird.distillation.cache_format import RecordFormat
from bigbird.distillation.targets import TopKTargets


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """What `verify_cache` found.

    Attributes:
      problems: one sentence each; none for a sound cache.
      bad_shards: numbers of the shards that must be captured again.
      sequences: records that are sound.
      tokens: rows of theirs.
    """

    problems: tuple[str, ...]
    bad_shards: tuple[int, ...]
    sequences: int
    tokens: int

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def __str__(self):
        found = f"{self.sequences:,} sequences, {self.tokens:,} tokens are sound."
        return "\n".join([found, *self.problems])


def verify_cache(directory: str | os.PathLike) -> VerifyReport:
    """Reads every byte of a cache and compares it with its indices and its manifest.

    Also of a cache that is not complete, which is then a problem.

    Raises:
      CacheError: where there is no manifest, or one that cannot be read.
    """
    manifest = read_manifest(directory)
    if manifest is None:
        raise CacheError(no_cache(directory))
    promised = {n: shard for n, shard in enumerate(manifest.get("shards", ()))}
    numbers = sorted(promised.keys() | set(shard_numbers(directory)))
    check = _ShardCheck(directory, RecordFormat.from_json(manifest))
    problems, bad_shards = [], []
    for number in numbers:
        found = check.problems(number, promised.get(number))
        problems += [f"{shard_path(directory, number).name}: {problem}" for problem in found]
        if found:
            bad_shards.append(number)
    if not manifest["complete"]:
        problems.append("The capture is not complete.")
    elif not bad_shards and check.counts() != {name: manifest[name] for name in check.counts()}:
        problems.append(
            f"{check.counts()} were found, and the manifest promises "
            f"{ {name: manifest[name] for name in check.counts()} }."
        )
    return VerifyReport(tuple(problems), tuple(bad_shards), check.sequences, check.tokens)


class _ShardCheck:
    """Checks shards one after another and remembers keys."""

    def __init__(self, directory, layout: RecordFormat):
        self.sequences, self.tokens = 0, 0
        self._directory = directory
        self._layout = layout
        self._decode = tf.function(
            layout.decode, input_signature=[tf.TensorSpec([], tf.string)], autograph=False
        )
        self._shard_of = {}

    def counts(self) -> dict[str, int]:
        return {"sequences": self.sequences, "tokens": self.tokens}

    def problems(self, number: int, promised: Mapping[str, Any] | None) -> list[str]:
        """What is wrong with a shard; `promised` is its entry in the manifest."""
        path = shard_path(self._directory, number)
        try:
            index = read_index(self._directory, number)
        except CacheError as error:
            return [str(error)]
        if index is None:
            return [f"{index_path(self._directory, number).name} is missing: it is not finished."]
        if promised and index.summary != {k: v for k, v in promised.items() if k != "name"}:
            return [f"the index has {index.summary}, and the manifest promises {promised}."]
        if not path.exists():
            return ["it is missing."]
        if path.stat().st_size != index.bytes:
            return [f"expected {index.bytes:,} bytes, found {path.stat().st_size:,}."]
        digest = file_sha256(path)
        if digest != index.sha256:
            return [
                f"its bytes have changed: expected the SHA-256 {index.sha256[:12]}…, found "
                f"{digest[:12]}…."
            ]
        return self._record_problems(number, index)

    def _record_problems(self, number, index):
        problems, tokens = [], 0
        places = zip(index.keys, index.offsets, index.sizes, index.checksums, strict=True)
        for key, *place in places:
            try:
                record = self._decode(read_record(shard_path(self._directory, number), *place))
                problems += [f"sequence {key}: {fault}" for fault in self._faults(key, record)]
                tokens += int(np.sum(record["mask"]))
            except (CacheError, tf.errors.OpError) as error:
                problems.append(f"sequence {key} cannot be read: {error}")
            if key in self._shard_of:
                problems.append(f"sequence {key} is also in shard {self._shard_of[key]}.")
            self._shard_of[key] = number
        if tokens != index.tokens:
            problems.append(f"it has {tokens} tokens; the index promises {index.tokens}.")
        if not problems:
            self.sequences += len(index.keys)
            self.tokens += tokens
        return problems

    def _faults(self, key, record):
        if record["key"].numpy().decode() != key:
            yield f"its record is that of {record['key'].numpy().decode()}."
        mask = record["mask"].numpy()
        for place in range(max(len(self._layout.temperatures), 1)):
            has_mass = bool(self._layout.temperatures)
            targets = TopKTargets(
                record["ids"],
                record["logits"],
                record["log_z"][:, place] if has_mass else None,
                self._layout.vocab_size,
                record["count"],
                self._layout.temperatures[place] if has_mass else 1.0,
            )
            for explanation, rows in targets.faults().items():
                if np.any(rows.numpy() & mask):
                    yield explanation
