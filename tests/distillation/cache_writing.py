"""A small cache to test with: what every sequence holds depends on its number alone."""

import numpy as np

from bigbird.distillation.cache import TeacherCacheWriter, TeacherRecord, sequence_key
from bigbird.distillation.targets import TopKTargets

VOCAB_SIZE, KEPT, SEQUENCES, SHARD_SEQUENCES = 50, 4, 22, 4


def input_ids(number):
    """Ids of a sequence of 3 to 9 tokens."""
    return np.random.default_rng(number).integers(1, VOCAB_SIZE, size=3 + number % 7)


def key(number):
    return sequence_key(input_ids(number))


def targets(number):
    rng = np.random.default_rng([number, 1])
    logits = 3 * rng.normal(size=(len(input_ids(number)), VOCAB_SIZE)).astype(np.float32)
    return TopKTargets.from_logits(logits, KEPT)


def record(number):
    return TeacherRecord(key(number), input_ids(number), targets(number))


def open_writer(directory, **changes):
    settings = {
        "vocab_size": VOCAB_SIZE,
        "k": KEPT,
        "shard_sequences": SHARD_SEQUENCES,
        "identity": {"teacher": {"fingerprint": "aa"}, "tokenizer": {"fingerprint": "bb"}},
        "compact": True,
    }
    return TeacherCacheWriter(directory, **{**settings, **changes})


def write_all(writer, numbers=range(SEQUENCES)):
    """Writes sequences; returns how many of them were new."""
    return sum(writer.write(key(n), input_ids(n), targets(n)) for n in numbers)


def write_cache(directory, **changes):
    with open_writer(directory, **changes) as writer:
        write_all(writer)


def files_of(directory):
    """Contents by name."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
