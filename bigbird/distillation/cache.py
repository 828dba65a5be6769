"""A teacher cache: what a teacher said of every sequence, written once and read by many runs.

Axis letters: B batch, L length, K kept.

    with TeacherCacheWriter("cache", vocab_size=32000, k=100, identity={...}) as writer:
        for ids, logits in teacher_outputs:
            writer.write(sequence_key(ids), ids, TopKTargets.from_logits(logits, 100))

    cache = TeacherCache("cache")
    for batch in cache.dataset(batch_size=8, seed=0):
        loss = topk_kl(student(batch["input_ids"]), kernel, cache.targets(batch),
                       sample_weight=batch["mask"])

`cache_writer.py` writes, `cache_reader.py` reads, `cache_verify.py` checks; `cache_format.py` has
the bytes of a record and `cache_files.py` the files.
"""

from bigbird.distillation.cache_files import CacheError
from bigbird.distillation.cache_format import TeacherRecord, sequence_key
from bigbird.distillation.cache_reader import TeacherCache
from bigbird.distillation.cache_verify import VerifyReport, verify_cache
from bigbird.distillation.cache_writer import TeacherCacheWriter, finalize_cache

__all__ = [
    "CacheError",
    "TeacherCache",
    "TeacherCacheWriter",
    "TeacherRecord",
    "VerifyReport",
    "finalize_cache",
    "sequence_key",
    "verify_cache",
]
