"""Captures a teacher into a cache: which sequence goes where, what is left to do, and an audit.

The order is that of the data, each distinct sequence once. Shard s holds the sequences s · S to
s · S + S - 1 whoever captures it, so any number of workers, stopped any number of times, write the
same files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import tensorflow as tf

from bigbird.distillation.cache_files import CacheError
from bigbird.distillation.cache_format import TeacherRecord, sequence_key
from bigbird.distillation.cache_reader import TeacherCache
from bigbird.distillation.cache_writer import TeacherCacheWriter
from bigbird.distillation.topk_teacher import TopKTeacher


@dataclasses.dataclass(frozen=True)
class CapturePlan:
    """Which sequences of a data set are captured.

    Attributes:
      positions: int64, the place of each distinct sequence in the data, ascending.
      tokens: int64, its tokens that take part.
      max_length: tokens of the longest sequence.
      repeated: sequences that are left out, since one like them comes before.
      empty: sequences that are left out, since none of their tokens takes part.
      fingerprint: tells data sets apart: of all keys, in order.
    """

    positions: np.ndarray
    tokens: np.ndarray
    max_length: int
    repeated: int
    empty: int
    fingerprint: str

    def __len__(self):
        return len(self.positions)


def plan_capture(dataset: tf.data.Dataset) -> CapturePlan:
    """Reads the data once, without the teacher, and says what there is to capture.

    Args:
      dataset: dicts of `input_ids` `[L]` without padding and, where there are any, `target_ids`,
        `mask`, `labels` and `document_ids`; the same in every process.

    Raises:
      ValueError: for data without a sequence that has something to capture.
    """
    positions, tokens, keys = [], [], {}
    repeated = empty = max_length = 0
    for position, sequence in enumerate(dataset.as_numpy_iterator()):
        ids = [sequence[name] for name in ("input_ids", "target_ids") if name in sequence]
        mask = sequence.get("mask")
        count = len(ids[-1]) if mask is None else int(np.sum(mask))
        key = sequence_key(*ids)
        if count == 0 or key in keys:
            empty += count == 0
            repeated += count > 0
            continue
        keys[key] = None
        positions.append(position)
        tokens.append(count)
        max_length = max(max_length, *map(len, ids))
    if not keys:
        raise ValueError("The data holds no sequence with a token to capture.")
    fingerprint = hashlib.sha256("".join(keys).encode()).hexdigest()
    return CapturePlan(
        np.array(positions), np.array(tokens), max_length, repeated, empty, fingerprint
    )


def capture(
    teacher: TopKTeacher,
    dataset: tf.data.Dataset,
    plan: CapturePlan,
    writer: TeacherCacheWriter,
    on_record: Callable[[TeacherRecord], None] = lambda record: None,
) -> None:
    """Captures what is left of the writer's own shards.

    Args:
      teacher: of the writer's format.
      dataset, plan: the data, and what `plan_capture` says of it.
      writer: with `expected_sequences=len(plan)`.
      on_record: called with every record that was written.

    Raises:
      OSError: where the disk is full or fails; finished shards are kept.
    """
    numbers = shards_to_capture(plan, writer)
    chosen = [plan.positions[_places(number, writer)] for number in numbers]
    stream = sequences_at(dataset, np.concatenate([np.zeros(0, np.int64), *chosen]))
    for number, positions in zip(numbers, chosen, strict=True):
        with writer.shard(number) as write:
            for record in teacher.records(list(itertools.islice(stream, len(positions)))):
                write(record)
                on_record(record)


def shards_to_capture(plan: CapturePlan, writer: TeacherCacheWriter) -> list[int]:
    """Returns the numbers of the writer's own shards that are not finished."""
    count = -(-len(plan) // writer.shard_sequences)
    own = range(writer.shard_index, count, writer.num_shards)
    return [number for number in own if number not in writer.shards]


def tokens_to_capture(plan: CapturePlan, writer: TeacherCacheWriter) -> int:
    """Returns how many tokens those shards have."""
    numbers = shards_to_capture(plan, writer)
    return int(sum(plan.tokens[_places(number, writer)].sum() for number in numbers))


def _places(number, writer):
    """Which of the distinct sequences are in a shard."""
    return slice(number * writer.shard_sequences, (number + 1) * writer.shard_sequences)


def sequences_at(
    dataset: tf.data.Dataset, positions: np.ndarray
) -> Iterator[Mapping[str, np.ndarray]]:
    """Gives the sequences at ascending positions of the data, reading it once."""
    wanted = np.zeros(positions.max(initial=-1) + 1, bool)
    wanted[positions] = True
    wanted = tf.constant(wanted)
    chosen = dataset.take(len(wanted)).enumerate().filter(lambda place, _: wanted[place])
    return (sequence for _, sequence in chosen.as_numpy_iterator())


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """How far a cache is from its teacher, and the teacher from itself.

    Logits are compared as distances to the largest of their token, normalisers likewise; both in
    nats. Those of a cache differ by the rounding of its logits.

    Attributes:
      sequences: how many were compared.
      cache: the differences, by name: means and maxima, and the share of ids that differ.
      again: those between two runs of the teacher.
    """

    sequences: int
    cache: dict[str, float]
    again: dict[str, float]

    def __str__(self):
        lines = [f"{self.sequences} sequences{'cache':>24}{'teacher again':>18}"]
        lines += [f"{n:24}{v:>18.3g}{self.again[n]:>18.3g}" for n, v in self.cache.items()]
        return "\n".join(lines)


def audit(
    teacher: TopKTeacher,
    dataset: tf.data.Dataset,
    plan: CapturePlan,
    cache: TeacherCache,
    count: int,
) -> AuditReport:
    """Runs the teacher twice over some sequences, evenly spread, and compares it with the cache.

    Raises:
      CacheError: where the data are not those of the cache.
    """
    places = np.linspace(0, len(plan) - 1, min(count, len(plan))).astype(np.int64)
    sequences = list(sequences_at(dataset, plan.positions[places]))
    exact = dataclasses.replace(cache.format, logits_dtype="float32")
    runs = []
    for _ in range(2):
        runs.append([exact.decode(exact.encode(r)) for r in teacher.records(sequences)])
    keys = [record["key"].numpy().decode() for record in runs[0]]
    for key in keys:
        if key not in cache:
            raise CacheError(
                f"{cache.directory} does not hold the sequence {key} of the data: give the data "
                "and flags of the capture."
            )
    stored = [cache[key] for key in keys]
    return AuditReport(len(keys), _differences(stored, runs[0]), _differences(runs[1], runs[0]))


def _differences(records, others):
    """Means and maxima over all kept entries and normalisers of pairs of records."""
    logits, log_z, other_ids = [], [], []
    for record, other in zip(records, others, strict=True):
        mask = record["mask"].numpy()
        same = np.equal(record["ids"], other["ids"])[mask]
        other_ids.append(~same.ravel())
        logits.append(_distance(record, other, "logits")[mask][same])
        log_z.append(_distance(record, other, "log_z")[mask].ravel())
    found = {"other ids, share": np.mean(np.concatenate(other_ids))}
    for name, parts in (("logits", logits), ("log_z", log_z)):
        values = np.concatenate([np.zeros(1), *parts])
        found |= {f"{name}, mean": values.mean(), f"{name}, largest": values.max()}
    return {name: float(value) for name, value in found.items()}


def _distance(record, other, name):
    return np.abs(tf.cast(record[name], tf.float32) - tf.cast(other[name], tf.float32))
